from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from mappers import FingerprintMismatch, UnsupportedModel, content_digest, fingerprint, tokenizer_digest
from mappers.fingerprint import same_vocabulary
from tests.mappers.pairs import add_tokenizer, llama, saved

RECIPE = "ab" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(llama(0, 2), tmp_path / "model")


def change_one_weight(folder: Path, by_ulp: bool = False) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    weight = tensors["model.layers.1.self_attn.k_proj.weight"]
    weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0)) if by_ulp else -weight[3, 5]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def derive(folder: Path) -> None:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    (folder / "kvrelay.json").write_text(json.dumps({"fingerprint": RECIPE, "output_digest": digest}))


def test_one_ulp_of_one_weight_changes_the_fingerprint(folder: Path) -> None:
    before = fingerprint(folder)
    change_one_weight(folder, by_ulp=True)
    assert len(before) == 64 and fingerprint(folder) != before


def test_a_copy_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert fingerprint(tmp_path / "copy") == fingerprint(folder)


def test_shards_have_the_fingerprint_of_a_single_file(folder: Path, tmp_path: Path) -> None:
    sharded = saved(llama(0, 2), tmp_path / "sharded", max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert fingerprint(sharded) == fingerprint(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-3},
        {"num_key_value_heads": 4},
        {"rope_parameters": {"a": 1}},
        {"sliding_window": 64},
        {"no_rope_layers": [1, 0]},
        {"attn_logit_softcapping": 50.0},
        {"quantization_config": {"bits": 4}},
    ],
)
def test_a_relevant_config_field_changes_the_fingerprint(folder: Path, change: dict[str, object]) -> None:
    before = fingerprint(folder)
    edit_config(folder, change)
    assert fingerprint(folder) != before


def test_an_irrelevant_config_field_does_not_change_the_fingerprint(folder: Path) -> None:
    before = fingerprint(folder)
    edit_config(folder, {"transformers_version": "9.9", "use_cache": False, "no_rope_layers": None})
    assert fingerprint(folder) == before


def edit_config(folder: Path, change: dict[str, object]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_a_renamed_tensor_changes_the_fingerprint(folder: Path) -> None:
    before = fingerprint(folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.other.weight"] = tensors.pop("model.norm.weight")
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    assert fingerprint(folder) != before


def test_a_second_call_reads_no_weights(folder: Path, tmp_path: Path) -> None:
    """Shown by a change that size and time do not reveal."""
    weights, cache = folder / "model.safetensors", tmp_path / "cache"
    before, times = fingerprint(folder, cache), (weights.stat().st_atime_ns, weights.stat().st_mtime_ns)
    change_one_weight(folder)
    os.utime(weights, ns=times)
    assert fingerprint(folder, cache) == before
    assert fingerprint(folder, tmp_path / "another cache") != before


def test_a_malformed_cache_entry_is_ignored(folder: Path, tmp_path: Path) -> None:
    before = fingerprint(folder, tmp_path / "cache")
    (entry,) = (tmp_path / "cache" / "digests").iterdir()
    entry.write_text("{")
    assert fingerprint(folder, tmp_path / "cache") == before


def test_an_unwritable_cache_only_costs_time(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert fingerprint(folder, tmp_path / "file") == fingerprint(folder)


def test_a_derived_model_has_the_fingerprint_of_its_recipe(folder: Path) -> None:
    derive(folder)
    assert fingerprint(folder) == RECIPE != content_digest(folder)


def test_last_bits_of_a_derived_model_do_not_matter(folder: Path) -> None:
    change_one_weight(folder, by_ulp=True)
    derive(folder)
    assert fingerprint(folder) == RECIPE


def test_a_modified_derived_model_is_refused(folder: Path) -> None:
    derive(folder)
    change_one_weight(folder)
    with pytest.raises(FingerprintMismatch, match="has changed since it was prepared"):
        fingerprint(folder)


@pytest.mark.parametrize("record", ["{}", '{"fingerprint": "ab"}', "[]", "{"])
def test_a_malformed_recipe_is_refused(folder: Path, record: str) -> None:
    (folder / "kvrelay.json").write_text(record)
    with pytest.raises(UnsupportedModel, match=r"kvrelay\.json"):
        fingerprint(folder)


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x08\0\0\0\0\0\0\0notjson!"])
def test_a_malformed_safetensors_file_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UnsupportedModel, match="is not a safetensors file"):
        fingerprint(folder)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="is not a model folder"):
        fingerprint(tmp_path)


def test_the_tokenizer_digest_covers_vocabulary_and_template(tmp_path: Path) -> None:
    for name, words in (("one", ["a", "b"]), ("same", ["a", "b"]), ("other", ["b", "a"])):
        add_tokenizer(tmp_path / name, words)
    one, same, other = (tokenizer_digest(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same != other
    (tmp_path / "same" / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_digest(tmp_path / "same") != one
    assert same_vocabulary(tmp_path / "same", tmp_path / "one")
    assert not same_vocabulary(tmp_path / "other", tmp_path / "one")
    assert tokenizer_digest(tmp_path) is None


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("tokenizer.model", "tokenizer.model"),
        ("tokenizer.model", "added_tokens.json"),
        ("vocab.json", "vocab.json"),
        ("vocab.json", "merges.txt"),
        ("vocab.txt", "vocab.txt"),
    ],
)
def test_the_tokenizer_digest_covers_each_file_of_older_formats(tmp_path: Path, form: str, name: str) -> None:
    one, same, other = (tmp_path / folder for folder in ("one", "same", "other"))
    for folder in (one, same, other):
        folder.mkdir()
        for file in (form, name):
            (folder / file).write_text("a")
    (other / name).write_text("b")
    assert tokenizer_digest(one) == tokenizer_digest(same) != tokenizer_digest(other)
    assert None not in (tokenizer_digest(one), tokenizer_digest(other))
    assert same_vocabulary(one, same) and not same_vocabulary(one, other)


def test_tokenizers_are_compared_in_a_common_format(tmp_path: Path) -> None:
    """The same tokenizer may be JSON in one folder, and a SentencePiece model in both or in neither."""
    one, other, none = (tmp_path / name for name in ("one", "other", "none"))
    add_tokenizer(one)
    for folder in (other, none):
        folder.mkdir()
    (other / "tokenizer.model").write_text("a")
    assert same_vocabulary(one, other) and same_vocabulary(one, none) and same_vocabulary(none, other)
    (one / "tokenizer.model").write_text("b")
    assert not same_vocabulary(one, other) and not same_vocabulary(other, one)
