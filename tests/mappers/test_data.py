from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path

import datasets
import pytest

from mappers import DataUnreadable, UnsupportedModel
from mappers.data import (
    PASSAGE_CHARACTERS,
    PIECE_BYTES,
    SHARES,
    Conversation,
    documents,
    read_conversations,
    render,
    split_of,
    stream_conversations,
)
from mappers.models import load_tokenizer
from tests.mappers.pairs import CHAT_TEMPLATE, add_tokenizer

TALK: Conversation = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
TURNS: Conversation = [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]  # ShareGPT style


def test_json_lines_of_messages(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"messages": TALK[::-1]}) + "\n")
    assert read_conversations(path) == [TALK, TALK[::-1]]


@pytest.mark.parametrize("cut", [0, 1, 40, 130])
def test_truncated_sharegpt_is_read_up_to_its_end(tmp_path: Path, cut: int) -> None:
    turns = [{"from": "human", "value": "w1 w2"}, {"from": "gpt", "value": "w3"}]
    items = [{"id": i, "conversations": turns} for i in range(3)]
    text = json.dumps(items)
    path = tmp_path / "sharegpt.json"
    path.write_text(text[: len(text) - cut])
    whole = 3 if cut <= 1 else 2 if cut < 120 else 1
    assert read_conversations(path) == [TALK] * whole


def test_messages_without_text_and_unknown_roles_are_skipped(tmp_path: Path) -> None:
    turns = [*TALK, {"role": "user", "content": None}, {"role": "user", "content": "  "}, {"role": "x", "content": "y"}]
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": turns}) + json.dumps({"messages": TALK[:1]}) + json.dumps({"no": 1}))
    assert read_conversations(path) == [TALK]


def test_malformed_turns_are_skipped(tmp_path: Path) -> None:
    turns = [*TALK, "w1", None, {"role": ["user"], "content": "w1"}, {"role": "user", "content": 5}]
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": turns}) + json.dumps({"messages": "w1 w2"}))
    assert read_conversations(path) == [TALK]


def test_a_lone_surrogate_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": [TALK[0] | {"content": "w1 \ud83d"}, TALK[1]]}))
    ((first, _),) = read_conversations(path)
    assert first["content"] == "w1 ?" and split_of([first])


def test_text_parts_and_developer_messages_are_read(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "w1"}, {"type": "image_url", "image_url": {"url": "x"}}, {"text": " w2"}, "w9"]
    turns = [{"role": "developer", "content": "w5"}, {"role": "user", "content": parts}, TALK[1]]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": turns}))
    assert read_conversations(tmp_path / "talks.jsonl") == [[{"role": "system", "content": "w5"}, *TALK]]


def test_lines_of_text_are_passages_unless_they_have_messages(tmp_path: Path) -> None:
    rows = [{"text": "w7 w8"}, {"text": "w1", "messages": TALK}, {"text": None}]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_conversations(tmp_path / "texts.jsonl") == [[{"role": "text", "content": "w7 w8"}], TALK]


@pytest.mark.parametrize("packed", [False, True])
def test_a_byte_order_mark_is_skipped_and_gzip_is_unpacked(tmp_path: Path, packed: bool) -> None:
    content = b"\xef\xbb\xbf" + json.dumps({"messages": TALK}).encode()
    (tmp_path / "talks").write_bytes(gzip.compress(content, mtime=0) if packed else content)
    assert read_conversations(tmp_path / "talks") == [TALK]


@pytest.mark.parametrize(
    "broken",
    ['{"messages": [}', '{"messages": [{"role": "user", "content": "w1}]}', '"messages": []}', "null", "oh", '"w1"'],
)
def test_a_malformed_line_is_reported_by_number(tmp_path: Path, broken: str) -> None:
    lines = [json.dumps({"messages": TALK})] * 2 + [broken] + [json.dumps({"messages": TALK})] * 3
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataUnreadable, match=r"talks\.jsonl: line 3 is not a JSON object: "):
        read_conversations(tmp_path / "talks.jsonl")


def test_lines_are_streamed_and_counted(tmp_path: Path) -> None:
    """A file of many pieces, with one object longer than several: everything before the malformed line is read."""
    long = json.dumps({"messages": [TALK[0] | {"content": "w1 " * PIECE_BYTES}, TALK[1]]})
    line = json.dumps({"messages": TALK, "filling": "é" * 1000}, ensure_ascii=False)
    lines = [*[line] * 600, long, *[line] * 1200, "{1}", *[line] * 600]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines), encoding="utf-8")
    talks = stream_conversations(tmp_path / "talks.jsonl")
    assert [next(talks) for _ in range(600)] == [TALK] * 600
    assert len(next(talks)[0]["content"]) == 3 * PIECE_BYTES
    assert [next(talks) for _ in range(1200)] == [TALK] * 1200
    with pytest.raises(DataUnreadable, match="line 1802 is not"):
        next(talks)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"w1 w2\0 w3", "is not UTF-8 text: it contains null bytes; allowed: JSON lines"),
        (b"w1 \xff w2", "is not UTF-8 text: 'utf-8' codec can't decode byte 0xff"),
        ("w1 w2".encode("utf-16"), "is not UTF-8 text: 'utf-8' codec can't decode byte 0xff"),
        (gzip.compress(b"w1 w2", mtime=0)[:-9], "cannot read .*: Compressed file ended"),
        (b"\x1f\x8bw1 w2 w3 w4 w5 w6", "cannot read .*: Unknown compression method"),
    ],
)
def test_binary_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "data").write_bytes(content)
    with pytest.raises(DataUnreadable, match=message):
        read_conversations(tmp_path / "data")


def test_an_incomplete_character_at_the_end_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes("w1 é".encode()[:-1])
    assert read_conversations(tmp_path / "book.txt") == [[{"role": "text", "content": "w1 "}]]


def test_plain_text_is_cut_into_passages_without_loss(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(4000))
    (tmp_path / "book.txt").write_text(text)
    passages = [talk[0]["content"] for talk in read_conversations(tmp_path / "book.txt")]
    assert "".join(passages) == text and len(passages) == len(text) // PASSAGE_CHARACTERS + 1


@pytest.mark.parametrize("content", ["", "\n \n", "[]", '{"messages": []}', '{"messa'])
def test_a_file_without_conversations_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "empty").write_text(content)
    with pytest.raises(DataUnreadable, match="holds no conversation"):
        read_conversations(tmp_path / "empty")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataUnreadable, match="cannot read .*nothing: No such file"):
        read_conversations(tmp_path / "nothing")


def test_splits_are_disjoint_and_depend_on_the_first_message() -> None:
    answer = {"role": "assistant", "content": "yes"}
    talks: list[Conversation] = [[{"role": "user", "content": f"question {i}"}, answer] for i in range(4000)]
    parts: dict[str, set[str]] = {}
    for talk in talks:
        parts.setdefault(split_of(talk), set()).add(talk[0]["content"])
        assert split_of([talk[0], answer | {"content": "no"}]) == split_of(talk)
    assert sum(len(part) for part in parts.values()) == len(set.union(*parts.values())) == 4000
    shares = {name: len(part) / 4000 for name, part in parts.items()}
    assert shares == pytest.approx({"heal": 0.6, "calibrate": 0.2, "tune": 0.1, "test": 0.1}, abs=0.03)


def test_a_shared_system_message_does_not_affect_the_splits() -> None:
    shared = {"role": "system", "content": "You are helpful."}
    talks: list[Conversation] = [[{"role": "user", "content": f"question {i}"}, TALK[1]] for i in range(100)]
    assert [split_of([shared, shared, *talk]) for talk in talks] == [split_of(talk) for talk in talks]
    assert split_of([shared]) == split_of([shared | {"role": "user"}])  # the only message


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
    for name in {*SHARES} - {split_of(TALK)}:
        with pytest.raises(DataUnreadable, match=f"none of 1 .* to the split {name}, which takes {SHARES[name]} of"):
            list(documents([TALK], name, tokenizer))


def test_conversations_rejected_by_the_template_are_skipped_and_reported_once(tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user begins') }}{% endif %}" + CHAT_TEMPLATE
    )
    split, lines = split_of(TALK), list[str]()
    refused: list[Conversation] = [[TALK[1] | {"content": f"w{i}"}, TALK[0]] for i in range(40)]
    read = list(documents([*refused, TALK, *refused], split, tokenizer, lines.append))
    assert read == [render(TALK, tokenizer)]
    assert len(lines) == 1 and "skipping" in lines[0] and lines[0].endswith("rejects a conversation: the user begins")
    with pytest.raises(DataUnreadable, match="rejects a conversation: the user begins"):
        list(documents(refused, split, tokenizer))


def test_a_model_without_a_template_renders_only_plain_text(tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = None
    assert render([{"role": "text", "content": "w5 w6"}], tokenizer)
    with pytest.raises(UnsupportedModel, match=f"{tmp_path} has no chat template .*; allowed: plain text"):
        list(documents([TALK], split_of(TALK), tokenizer))


def test_a_plain_passage_is_rendered_without_the_template(tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert render([{"role": "text", "content": "w5 w6"}], tokenizer) == tokenizer.convert_tokens_to_ids(["w5", "w6"])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """A fake hub with the same rows under any name; the calls it received."""
    calls: list[tuple[object, ...]] = []

    def load_dataset(*name: str, split: str, streaming: bool) -> datasets.IterableDataset:
        calls.append((*name, split, streaming))
        return rows_of(TALK, TURNS, "w7 w8", " ").to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def rows_of(*items: Conversation | str) -> datasets.Dataset:
    """Rows of messages of either style or of text, and one empty row."""
    empty = {"messages": None, "conversations": None, "text": None}
    return datasets.Dataset.from_list([*(empty | {_column(item): item} for item in items), empty])


def _column(item: Conversation | str) -> str:
    if isinstance(item, str):
        return "text"
    return "conversations" if "from" in item[0] else "messages"


def test_a_hub_dataset_is_read_by_name(hub: list[tuple[object, ...]]) -> None:
    converted = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    for name in ("someone/talks", "someone/talks:test", "someone/talks:en:dev"):
        assert read_conversations(name) == [TALK, converted, [{"role": "text", "content": "w7 w8"}]]
    assert hub == [
        ("someone/talks", "train", True),
        ("someone/talks", "test", True),
        ("someone/talks", "en", "dev", True),
    ]


def test_a_parquet_file_is_read_as_a_dataset(tmp_path: Path) -> None:
    rows_of(TALK, "w7").to_parquet(tmp_path / "talks.parquet")
    assert read_conversations(tmp_path / "talks.parquet") == [TALK, [{"role": "text", "content": "w7"}]]


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    rows_of(TALK).save_to_disk(tmp_path / "rows")
    datasets.DatasetDict({"train": rows_of(TALK), "test": rows_of(TALK, TALK)}).save_to_disk(tmp_path / "parts")
    assert read_conversations(tmp_path / "rows") == read_conversations(tmp_path / "parts") == [TALK]


def test_a_folder_of_data_files_is_read(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"messages": TALK}))
    assert read_conversations(tmp_path) == [TALK, TALK]


def test_an_unreadable_dataset_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataUnreadable, match="cannot read the dataset 'someone/else': Couldn't reach .*; allowed:"):
        read_conversations("someone/else")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataUnreadable, match=r"cannot read the dataset '.*cut.parquet': Parquet magic bytes not found"):
        read_conversations(tmp_path / "cut.parquet")
    datasets.DatasetDict({"test": rows_of(TALK)}).save_to_disk(tmp_path / "parts")
    with pytest.raises(DataUnreadable, match="the dataset '.*parts' has no part 'train'; allowed:"):
        read_conversations(tmp_path / "parts")


def test_without_the_package_datasets_its_install_command_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataUnreadable, match=r"someone/talks is not a file; .*\(pip install datasets\)"):
        read_conversations("someone/talks")
    (tmp_path / "talks.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataUnreadable, match=r"talks\.parquet is not text; .*\(pip install datasets\)"):
        read_conversations(tmp_path / "talks.parquet")
