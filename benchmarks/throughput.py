"""Tokens per second of one worker with 1 and 4 concurrent chats, against sequential calls of transformers' `generate`.

    python benchmarks/throughput.py --json throughput.json

    worker      chat 0 |─ prefill ─|─ decode ─ ─ ─ ─|         streams of its HTTP API; measured from the first request
                chat 1 |    ─ prefill ─|─ decode ─ ─ ─|       to the end of the last answer
    generate    |─ chat 0 ─────────|─ chat 1 ─────────|       in this process, with the same prompt tokens

Both decode greedily, with one thread per core and no prefix cache, up to `--tokens` tokens for a prompt of `--length`.
The arms take turns on the same chats. Results are medians over the repeats. On `smol` it takes three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mappers.models import load_model, load_tokenizer
from tools import family, measuring
from tools.client import Documents
from tools.output import add_json_option, render, write_json
from workers.api.client import WorkerClient
from workers.api.schemas import ChatRequest, KVTransferParams, Message, Prompt, WorkerStreamOptions

ARMS = ("worker", "generate")
QUESTION = "Tell in full what is said about the third entry, and what you make of it."
SALT = "0" * 16
TIMEOUT_S = 300.0

Talk = list[Message]


@dataclass(frozen=True)
class GeneratedText:
    text: str
    num_tokens: int


@dataclass(frozen=True)
class Row:
    """`chats` concurrent chats, answered by one arm."""

    arm: str
    chats: int
    repeat: int
    tokens: int
    seconds: float
    tokens_per_s: float
    same_answers: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default=family.DEFAULT_FAMILY)
    parser.add_argument(
        "--chats", type=measuring.counts, default=[1, 4], help="numbers of concurrent chats (default 1,4)"
    )
    parser.add_argument(
        "--length", type=measuring.length, default=256, help="approximate number of prompt tokens (default %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=measuring.count, default=64, help="maximum tokens of an answer (default %(default)s)"
    )
    parser.add_argument("--repeats", type=measuring.count, default=3)
    add_json_option(parser, "all rows and the medians")
    options = parser.parse_args(argv)
    return measuring.run("throughput", lambda: _throughput(options))


def _throughput(options: argparse.Namespace) -> int:
    rows = _run(options)
    found = summary(rows)
    write_json(options.json, measuring.report(rows, found))
    print(_table(found))
    return 0


def _run(options: argparse.Namespace) -> list[Row]:
    folders = family.prepare(options.family)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with measuring.own_stack("throughput", family.configuration(options.family, folders)) as (stack, secret):
        url = stack.workers["large-0"].url
        documents = Documents(url, secret)

        def talk(name: str) -> Talk:
            document = documents.of_length(options.length, name)
            return [Message(role="system", content=document), Message(role="user", content=QUESTION)]

        async def run() -> list[Row]:
            async with WorkerClient(url, secret) as client:
                generate = TransformersGenerate(folders["large"])
                return await measure(client, generate, talk, options.chats, options.tokens, options.repeats)

        return asyncio.run(run())


class TransformersGenerate:
    """transformers' `generate`, with a model of its own."""

    def __init__(self, folder: str | Path):
        self._model = load_model(folder)
        self._tokenizer = load_tokenizer(folder)

    def answer(self, prompt: Sequence[int], max_tokens: int) -> GeneratedText:
        ids = torch.tensor([list(prompt)])
        written = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=self._tokenizer.eos_token_id,
        )[0, len(prompt) :]
        return GeneratedText(self._tokenizer.decode(written, skip_special_tokens=True), len(written))


async def measure(
    client: WorkerClient,
    generate: TransformersGenerate,
    talk: Callable[[str], Talk],
    chats: Sequence[int],
    max_tokens: int,
    repeats: int,
) -> list[Row]:
    """`talk(name)` returns a different conversation for each name. Raises `KvrelayError`."""
    rows: list[Row] = []
    for repeat in range(-1, repeats):  # the first warms up
        for num_chats in chats:
            talks = [talk(f"{repeat} {num_chats} {n}") for n in range(num_chats)]
            prompts = [(await client.tokenize(Prompt(messages=one), timeout_s=TIMEOUT_S)).token_ids for one in talks]
            answers, seconds = {}, {}
            for arm in ARMS if repeat % 2 else reversed(ARMS):
                began = time.perf_counter()
                if arm == "worker":
                    answers[arm] = await asyncio.gather(*(_ask(client, one, max_tokens) for one in talks))
                else:
                    answers[arm] = [generate.answer(prompt, max_tokens) for prompt in prompts]
                seconds[arm] = time.perf_counter() - began
            rows += [_row(arm, num_chats, repeat, answers, seconds[arm]) for arm in ARMS if repeat >= 0]
        print(f"  repeat {repeat + 1}/{repeats}" if repeat >= 0 else "  warmed up", flush=True)
    return rows


async def _ask(client: WorkerClient, talk: Talk, max_tokens: int) -> GeneratedText:
    request = ChatRequest(
        messages=talk,
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        stream_options=WorkerStreamOptions(include_usage=True),
        kv_transfer_params=KVTransferParams(reuse=False, store=False),
        tenant_salt=SALT,
    )
    chunks = [chunk async for chunks in client.chat_stream(request, timeout_s=TIMEOUT_S) for chunk in chunks]
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    return GeneratedText(text, chunks[-1]["usage"]["completion_tokens"])


def _row(arm: str, chats: int, repeat: int, answers: dict[str, list[GeneratedText]], seconds: float) -> Row:
    tokens = sum(answer.num_tokens for answer in answers[arm])
    same = sum(ours == theirs for ours, theirs in zip(*answers.values(), strict=True))
    return Row(arm, chats, repeat, tokens, seconds, tokens / seconds, same)


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return, by number of chats, the median tokens per second of both arms, and how many answers agree."""
    return [_of_chats([row for row in rows if row.chats == chats]) for chats in sorted({row.chats for row in rows})]


def _of_chats(rows: Sequence[Row]) -> dict[str, Any]:
    rates = {arm: statistics.median(row.tokens_per_s for row in rows if row.arm == arm) for arm in ARMS}
    answered = [row for row in rows if row.arm == ARMS[0]]
    return {
        "chats": rows[0].chats,
        "worker_tokens_per_s": rates["worker"],
        "generate_tokens_per_s": rates["generate"],
        "ratio": rates["worker"] / rates["generate"],
        "answers": sum(row.chats for row in answered),
        "same_answers": sum(row.same_answers for row in answered),
    }


def _table(found: Sequence[dict[str, Any]]) -> str:
    head = ["chats", "worker tokens/s", "generate tokens/s", "ratio", "same answers"]
    rows = [
        [one["chats"], one["worker_tokens_per_s"], one["generate_tokens_per_s"], f"{one['ratio']:.2f}"]
        + [f"{one['same_answers']}/{one['answers']}"]
        for one in found
    ]
    return "\n" + render(head, rows)


if __name__ == "__main__":
    sys.exit(main())
