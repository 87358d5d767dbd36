"""Models and tokenizers that cannot be loaded are reported, whatever the libraries raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mappers import UnsupportedModel
from mappers.models import load_model, load_tokenizer
from tests.mappers.pairs import add_tokenizer, llama, saved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    add_tokenizer(saved(llama(1, 1), tmp_path / "model"))
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("name", "damaged", "load"),
    [
        ("model.safetensors", lambda content: content[: len(content) // 2], load_model),
        ("model.safetensors", lambda content: b"no tensors", load_model),
        ("config.json", lambda content: json.dumps({**json.loads(content), "hidden_size": 64}).encode(), load_model),
        (
            "config.json",
            lambda content: json.dumps({**json.loads(content), "num_attention_heads": "x"}).encode(),
            load_model,
        ),
        ("tokenizer.json", lambda content: b"{}", load_tokenizer),
        ("tokenizer.json", lambda content: b"no JSON", load_tokenizer),
    ],
)
def test_a_damaged_file_is_reported(
    folder: Path, name: str, damaged: Callable[[bytes], bytes], load: Callable[[Path], Any]
) -> None:
    load(folder)
    (folder / name).write_bytes(damaged((folder / name).read_bytes()))
    with pytest.raises(UnsupportedModel, match=r"no (model|tokenizer) at '.*/model': \w+: "):
        load(folder)
