"""`kvrelay fit` for a user with two models and conversation logs."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path

import pytest

from mappers.bundle import load_manifest, save, update
from mappers.commands import fit
from mappers.data import read_conversations, split_of
from mappers.manifest import Evaluation
from mappers.mapper import Mapper
from tests.mappers.pairs import add_tokenizer, disguised, llama, saved, talks_file

SIZE = 2 * 41 + 3  # tokens of each conversation: two messages and the shared system message


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two model folders with a tokenizer, and conversations that share a system message."""
    root = tmp_path_factory.mktemp("place")
    large = llama(1, 3)
    for name, model in (("large", large), ("small", disguised(large))):
        add_tokenizer(saved(model, root / name))
    talks = [json.loads(line)["messages"] for line in talks_file(root / "plain", 120, 40).read_text().splitlines()]
    system = {"role": "system", "content": ""}
    lines = [json.dumps({"messages": [system | {"content": "w1 w2"}, *talk]}) + "\n" for talk in talks]
    (root / "talks.jsonl").write_text("".join(lines))
    return root


@pytest.fixture
def arguments(place: Path, tmp_path: Path) -> list[str]:
    models = ["--source", str(place / "small"), "--target", str(place / "large"), "--layers", "1"]
    return [*models, "--data", str(place / "talks.jsonl"), "--out", str(tmp_path / "b")]


def num_to_fit(place: Path) -> int:
    return sum(split_of(talk) == "calibrate" for talk in read_conversations(place / "talks.jsonl"))


def test_fewer_tokens_than_requested_are_reported(
    place: Path, tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A shared system message does not put all conversations into one split."""
    number = num_to_fit(place)
    tokens = number * SIZE
    assert number > 10 and fit.main(arguments) == 0
    output = capsys.readouterr().err
    assert f"{tokens} tokens in {number} documents, fewer than the 100000 requested\n" in output
    assert f"{tokens} of {tokens} tokens" in output and "of 100000" not in output
    assert load_manifest(tmp_path / "b").calibration.num_tokens == tokens


def test_too_few_tokens_without_the_held_out_ones_are_refused_before_a_model_is_loaded(
    place: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Five documents would be enough, but one is held out, and four tokens of each are skipped."""
    command = [*arguments, "--tokens", str(5 * SIZE), "--layers", "3", "--joint"]
    assert fit.main(command) == 1
    output = capsys.readouterr().err
    assert f"{4 * (SIZE - 4)} tokens for 96 features; at least 384 are needed besides the held-out ones" in output
    assert "Loading weights" not in output


def test_an_evaluated_bundle_is_replaced_only_on_request(
    place: Path, tmp_path: Path, arguments: list[str], twin_mapper: Mapper, capsys: pytest.CaptureFixture[str]
) -> None:
    save(twin_mapper, tmp_path / "b")
    update(tmp_path / "b", evaluation=Evaluation(data="x", head=4, tail=64, scored=128, tokens=0, arms=(), lengths=()))
    assert fit.main(arguments) == 1
    assert (
        "b is a bundle that has been evaluated; allowed: another folder (--out), or --replace"
        in capsys.readouterr().err
    )
    assert load_manifest(tmp_path / "b").bundle_id == twin_mapper.bundle_id
    assert fit.main([*arguments, "--replace"]) == 0
    assert load_manifest(tmp_path / "b").evaluation is None


def test_no_copies_fits_shared_layers(place: Path, tmp_path: Path, arguments: list[str]) -> None:
    same = [*arguments, "--source", str(place / "large")]
    assert fit.main(same) == 0
    assert load_manifest(tmp_path / "b").copied_layers == (0, 1, 2)
    assert fit.main([*same, "--no-copies"]) == 0
    assert load_manifest(tmp_path / "b").copied_layers == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--out", "/proc/nowhere/b"], "cannot write to /proc: "),
        (["--data", "talks"], "cannot read talks: the file does not exist; allowed: JSON lines"),
        (["--data", "EMPTY"], "holds no conversation; allowed: JSON lines"),
        (["--data", "BROKEN"], "broken: line 2 is not a JSON object: "),
        (["--data", "BINARY"], "binary is not UTF-8 text: it contains null bytes"),
    ],
)
def test_unreadable_data_and_unwritable_folders_are_reported_first(
    tmp_path: Path, arguments: list[str], change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("empty", b""), ("broken", b'{"text": "w1"}\n{"text"}\n{"text": "w1"}\n'), ("binary", b"\0")):
        (tmp_path / name).write_bytes(content)
    files = {name: str(tmp_path / name.lower()) for name in ("EMPTY", "BROKEN", "BINARY")}
    assert fit.main([*arguments, *(files.get(part, part) for part in change)]) == 1
    output = capsys.readouterr().err
    assert message in output and len(output.splitlines()) == 1


class InterruptingStream(io.StringIO):
    """A stream that raises SIGINT when a line with this beginning is written."""

    def __init__(self, begin: str):
        super().__init__()
        self._begin = begin

    def write(self, text: str) -> int:
        written = super().write(text)
        if text.startswith(self._begin):
            signal.raise_signal(signal.SIGINT)
        return written


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_prints_no_traceback_and_the_same_command_resumes(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", output := InterruptingStream("choosing source layers"))
        assert fit.main([*arguments, "--checkpoint-minutes", "0"]) == 130
    file = tmp_path / ".b.partial"
    assert output.getvalue().endswith(f"kvrelay fit: interrupted; the same command resumes from {file}\n")
    assert fit.main(arguments) == 0
    again = capsys.readouterr().err
    assert f"resuming from {file}" in again and "tokens, " not in again  # nothing is prefilled again
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
