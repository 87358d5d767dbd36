from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from mappers import DataUnreadable
from mappers.data import PASSAGE_CHARACTERS, Conversation, documents, read_conversations, render, split_of
from mappers.models import load_tokenizer
from tests.mappers.pairs import add_tokenizer

TALK: Conversation = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]


def test_json_lines_of_messages(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"messages": TALK[::-1]}) + "\n")
    assert read_conversations(path) == [TALK, TALK[::-1]]


@pytest.mark.parametrize("cut", [0, 1, 40, 130])
def test_sharegpt_is_read_up_to_where_it_is_cut(tmp_path: Path, cut: int) -> None:
    turns = [{"from": "human", "value": "w1 w2"}, {"from": "gpt", "value": "w3"}]
    items = [{"id": i, "conversations": turns} for i in range(3)]
    text = json.dumps(items)
    path = tmp_path / "sharegpt.json"
    path.write_text(text[: len(text) - cut])
    whole = 3 if cut <= 1 else 2 if cut < 120 else 1
    assert read_conversations(path) == [TALK] * whole


def test_messages_without_text_and_unknown_roles_are_left_out(tmp_path: Path) -> None:
    turns = [*TALK, {"role": "user", "content": None}, {"role": "user", "content": "  "}, {"role": "x", "content": "y"}]
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": turns}) + json.dumps({"messages": TALK[:1]}) + json.dumps({"no": 1}))
    assert read_conversations(path) == [TALK]


def test_turns_of_another_kind_are_left_out(tmp_path: Path) -> None:
    turns = [*TALK, "w1", None, {"role": ["user"], "content": "w1"}, {"role": "user", "content": 5}]
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": turns}) + json.dumps({"messages": "w1 w2"}))
    assert read_conversations(path) == [TALK]


def test_half_a_character_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": [TALK[0] | {"content": "w1 \ud83d"}, TALK[1]]}))
    ((first, _),) = read_conversations(path)
    assert first["content"] == "w1 ?" and split_of([first])


def test_plain_text_is_cut_into_passages_that_lose_nothing(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(4000))
    (tmp_path / "book.txt").write_text(text)
    passages = [talk[0]["content"] for talk in read_conversations(tmp_path / "book.txt")]
    assert "".join(passages) == text and len(passages) == len(text) // PASSAGE_CHARACTERS + 1


@pytest.mark.parametrize("content", ["", "[]", '{"messages": []}', "{broken"])
def test_a_file_without_conversations_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "empty").write_text(content)
    with pytest.raises(DataUnreadable, match="holds no conversation"):
        read_conversations(tmp_path / "empty")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataUnreadable, match="cannot read .*nothing: No such file"):
        read_conversations(tmp_path / "nothing")


def test_the_splits_are_disjoint_and_decided_by_the_first_message() -> None:
    answer = {"role": "assistant", "content": "yes"}
    talks: list[Conversation] = [[{"role": "user", "content": f"question {i}"}, answer] for i in range(4000)]
    parts: dict[str, set[str]] = {}
    for talk in talks:
        parts.setdefault(split_of(talk), set()).add(talk[0]["content"])
        assert split_of([talk[0], answer | {"content": "no"}]) == split_of(talk)
    assert sum(len(part) for part in parts.values()) == len(set.union(*parts.values())) == 4000
    shares = {name: len(part) / 4000 for name, part in parts.items()}
    assert shares == pytest.approx({"heal": 0.6, "calibrate": 0.2, "tune": 0.1, "test": 0.1}, abs=0.03)


def test_the_split_is_the_published_hash() -> None:
    bucket = int(hashlib.sha256(b"w1 w2").hexdigest()[:8], 16) % 100
    expected = "heal" if bucket < 60 else "calibrate" if bucket < 80 else "tune" if bucket < 90 else "test"
    assert split_of(TALK) == expected


def test_documents_are_rendered_by_the_chat_template(tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    expected = tokenizer.convert_tokens_to_ids(["user", "w1", "w2", "assistant", "w3"])
    assert render(TALK, tokenizer) == expected
    assert list(documents([TALK], split_of(TALK), tokenizer)) == [expected]
    others = {"heal", "calibrate", "tune", "test"} - {split_of(TALK)}
    assert all(not list(documents([TALK], name, tokenizer)) for name in others)  # type: ignore[arg-type]


def test_a_plain_passage_is_rendered_as_it_stands(tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert render([{"role": "text", "content": "w5 w6"}], tokenizer) == tokenizer.convert_tokens_to_ids(["w5", "w6"])


DATASETS_MODULE = '''
import json
import sys
from pathlib import Path

ROWS = {rows!r}

def load_dataset(name, split):
    if Path(name).is_dir():
        assert split == "train"
        return [json.loads(line) for line in (Path(name) / "data.jsonl").read_text().splitlines()]
    if name != "someone/talks":
        raise FileNotFoundError("Dataset '" + name + "' doesn't exist on the Hub")
    if split != "test":
        raise ValueError("Unknown split " + split)
    return ROWS

def load_from_disk(folder):
    rows = json.loads((Path(folder) / "rows.json").read_text())
    return {{"train": rows}} if (Path(folder) / "dataset_dict.json").exists() else rows
'''


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `datasets` with one dataset on its hub, in place of the real one."""
    turns = [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]
    rows: list[dict[str, object]] = [{"messages": TALK}, {"conversations": turns}]
    rows += [{"text": "w7 w8"}, {"text": " "}, {"x": 1}]
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "datasets.py").write_text(DATASETS_MODULE.format(rows=rows))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)


def test_a_dataset_of_the_hub_is_read_by_its_name(datasets: None) -> None:
    talk = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    assert read_conversations("someone/talks:test") == [TALK, talk, [{"role": "text", "content": "w7 w8"}]]


@pytest.mark.parametrize("mark", ["state.json", "dataset_dict.json", None])
def test_a_dataset_in_a_folder_is_read(datasets: None, tmp_path: Path, mark: str | None) -> None:
    """One that was saved, with its parts or without, and one of data files."""
    row = {"messages": TALK}
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / ("rows.json" if mark else "data.jsonl")).write_text(json.dumps([row] if mark else row))
    if mark:
        (tmp_path / "set" / mark).write_text("{}")
    assert read_conversations(tmp_path / "set") == [TALK]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("someone/else", "no dataset at 'someone/else': Dataset 'someone/else' doesn't exist on the Hub; allowed:"),
        ("someone/talks", "no dataset at 'someone/talks': Unknown split train"),
    ],
)
def test_a_dataset_that_is_not_there_is_told(datasets: None, name: str, message: str) -> None:
    with pytest.raises(DataUnreadable, match=message):
        read_conversations(name)


def test_without_the_package_datasets_its_install_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataUnreadable, match=r"someone/talks is no file; .*\(pip install datasets\)"):
        read_conversations("someone/talks")
