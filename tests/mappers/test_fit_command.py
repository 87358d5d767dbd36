"""`kvrelay fit` as one meets it who has two models and logs of one's own."""

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

SIZE = 2 * 41 + 3  # tokens of each conversation: two speeches, and what all share


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two model folders with a tokenizer, and conversations which a system message begins that all share."""
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


def test_fewer_tokens_than_asked_for_are_told_and_counted_to(
    place: Path, tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One shared system message does not put all conversations into one split."""
    number = num_to_fit(place)
    tokens = number * SIZE
    assert number > 10 and fit.main(arguments) == 0
    told = capsys.readouterr().err
    assert f"{tokens} tokens in {number} documents, fewer than the 100000 requested\n" in told
    assert f"{tokens} of {tokens} tokens" in told and "of 100000" not in told
    assert load_manifest(tmp_path / "b").calibration.num_tokens == tokens


def test_tokens_that_are_too_few_without_what_is_held_out_are_told_before_a_model_is_loaded(
    place: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Five documents are enough to look at, but one of them is held out, and four tokens of each are left out."""
    asked = [*arguments, "--tokens", str(5 * SIZE), "--layers", "3", "--joint"]
    assert fit.main(asked) == 1
    told = capsys.readouterr().err
    assert f"{4 * (SIZE - 4)} tokens for 96 features; at least 384 are needed besides the held-out ones" in told
    assert "Loading weights" not in told


def test_a_bundle_that_was_judged_is_replaced_only_if_asked(
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


def test_copies_may_be_left_out(place: Path, tmp_path: Path, arguments: list[str]) -> None:
    same = [*arguments, "--source", str(place / "large")]
    assert fit.main(same) == 0
    assert load_manifest(tmp_path / "b").copied_layers == (0, 1, 2)
    assert fit.main([*same, "--no-copies"]) == 0
    assert load_manifest(tmp_path / "b").copied_layers == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--out", "/proc/nowhere/b"], "cannot write to /proc: "),
        (["--data", "talks"], "cannot read talks: there is no such file; allowed: JSON lines"),
        (["--data", "EMPTY"], "holds no conversation; allowed: JSON lines"),
        (["--data", "BROKEN"], "broken: line 2 begins what is no JSON object: "),
        (["--data", "BINARY"], "binary is no UTF-8 text: it holds zeros"),
    ],
)
def test_what_cannot_be_read_or_written_is_told_first(
    tmp_path: Path, arguments: list[str], change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("empty", b""), ("broken", b'{"text": "w1"}\n{"text"}\n{"text": "w1"}\n'), ("binary", b"\0")):
        (tmp_path / name).write_bytes(content)
    files = {name: str(tmp_path / name.lower()) for name in ("EMPTY", "BROKEN", "BINARY")}
    assert fit.main([*arguments, *(files.get(part, part) for part in change)]) == 1
    told = capsys.readouterr().err
    assert message in told and len(told.splitlines()) == 1


class Stopping(io.StringIO):
    """Where Ctrl-C is pressed when a line is told that begins so."""

    def __init__(self, begin: str):
        super().__init__()
        self._begin = begin

    def write(self, text: str) -> int:
        written = super().write(text)
        if text.startswith(self._begin):
            signal.raise_signal(signal.SIGINT)
        return written


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_is_no_traceback_and_the_same_command_goes_on(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", told := Stopping("choosing source layers"))
        assert fit.main([*arguments, "--checkpoint-minutes", "0"]) == 130
    file = tmp_path / ".b.partial"
    assert told.getvalue().endswith(f"kvrelay fit: interrupted; the same command resumes from {file}\n")
    assert fit.main(arguments) == 0
    again = capsys.readouterr().err
    assert f"resuming from {file}" in again and "tokens, " not in again  # nothing is read again
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
