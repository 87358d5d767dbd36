"""Method `hidden`: predicts hidden states, followed by the target's own projections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mappers import UnsupportedModel
from mappers.methods.hidden import Projection, check_projections, projections, record_hidden_states
from mappers.models import load_model, prefill
from mappers.rope import Rope
from tests.mappers.pairs import HEAD_DIM, HEADS, KV_HEADS, VOCABULARY, fit_with, saved

KINDS: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "phi3": (Phi3ForCausalLM, Phi3Config),
}


def small(kind: str, folder: Path) -> Path:
    """Save a random model of two layers."""
    torch.manual_seed(5)
    model, config = KINDS[kind]
    settings = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made = model(config(**settings, **heads, **tokens, initializer_range=0.3, max_position_embeddings=512)).eval()
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return saved(made, folder)


def test_keys_and_values_are_the_projections_of_the_recorded_states(tmp_path: Path) -> None:
    """Also for a model with biases and a prefill in two chunks."""
    model = load_model(small("qwen2", tmp_path / "qwen2"))
    with record_hidden_states(model) as states:
        cache = prefill(model, list(range(20, 40)), prefill(model, list(range(20))))
    assert {layer: tuple(hidden.shape) for layer, hidden in states.items()} == {0: (40, 32), 1: (40, 32)}
    check_projections(projections(model), states, Rope.of(model).strip_cache(cache))
    wrong = [{kind: Projection(p.weight, p.bias + 1) for kind, p in layer.items()} for layer in projections(model)]
    with pytest.raises(UnsupportedModel, match="the keys of layer 0 are not the projection of its hidden states"):
        check_projections(wrong, states, Rope.of(model).strip_cache(cache))
    prefill(model, [1, 2, 3])
    assert len(states[0]) == 40


def test_with_equal_layers_hidden_equals_ridge(
    folders: dict[str, Path], documents: list[list[int]], tmp_path: Path
) -> None:
    target = small("qwen2", tmp_path / "qwen2")
    given: dict[str, Any] = {"layers": 3, "copies": False, "precision": "float32", "ridges": (1e-3,)}
    hidden = fit_with(folders["other"], target, documents, method="hidden", **given)
    ridge = fit_with(folders["other"], target, documents, method="ridge", joint=True, **given)
    same = 0
    for layer, (hidden_spec, ridge_spec) in enumerate(zip(hidden.manifest.layers, ridge.manifest.layers, strict=True)):
        assert hidden_spec.keys.key_layers == hidden_spec.keys.value_layers == hidden_spec.values.key_layers
        assert hidden_spec.keys.method == "hidden"
        for kind in ("keys", "values"):
            if hidden_spec.keys.key_layers == ridge_spec.of(kind).key_layers:
                name, same = f"layers.{layer}.{kind}", same + 1
                for part in ("weight", "bias"):
                    torch.testing.assert_close(
                        hidden.weights[f"{name}.{part}"], ridge.weights[f"{name}.{part}"], rtol=1e-3, atol=1e-4
                    )
    assert same


def test_shared_layers_are_copied_with_method_hidden(folders: dict[str, Path], documents: list[list[int]]) -> None:
    mapper = fit_with(folders["sibling"], folders["large"], documents, method="hidden", layers=2)
    assert mapper.manifest.copied_layers == (0, 1)
    assert [spec.values.method for spec in mapper.manifest.layers] == ["copy", "copy", "hidden", "hidden"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [("qwen3", "Qwen3ForCausalLM norms its keys after the projection"), ("phi3", "no separate projection for keys")],
)
def test_targets_whose_keys_are_not_a_projection_are_refused(
    folders: dict[str, Path], documents: list[list[int]], tmp_path: Path, kind: str, message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        fit_with(folders["other"], small(kind, tmp_path / kind), documents, method="hidden")
