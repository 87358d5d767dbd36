"""The expected answers, by plain transformers: over the native cache, and over the offline replay of a handoff.

    python -m workers.reference --small MODEL --large MODEL --bundle BUNDLE --threads N

writes `{"ready": true}` once the models are loaded. Then it reads one JSON question per line from standard input:
`{"tier", "messages", "mapped_tokens", "max_tokens", "body"}`, with the body of a greedy chat completion with
log-probabilities. It writes `{"wrong": null}` or `{"wrong": "<the difference>"}`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import mappers
from workers.api.schemas import DEFAULT_NATIVE_HEAD as HEAD

Messages = list[dict[str, Any]]

TIE = 1e-4  # two tokens whose log-probabilities are that close may come in either order
LOGPROB_TOLERANCE = 2e-3


class WrongAnswer(Exception):
    """An answer is wrong; the message says where it first differs."""


@dataclass(frozen=True)
class Step:
    """One greedy step: the most likely token and the second one, with their log-probabilities."""

    id: int
    token: str
    logprob: float
    second: str
    second_logprob: float

    @property
    def is_tie(self) -> bool:
        return self.logprob - self.second_logprob < TIE


class Reference:
    """The models of each tier in plain transformers, and the bundle between `small` and `large`."""

    def __init__(self, folders: Mapping[str, Path], bundle: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folders["small"])
        self.models = {tier: _load(folder) for tier, folder in folders.items()}
        self.mapper = mappers.load(bundle)

    def prompt(self, messages: Messages) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def expected(self, tier: str, messages: Messages, num_mapped: int, max_tokens: int) -> list[Step]:
        """Return the expected answer of a tier whose cache has `num_mapped` mapped tokens."""
        if num_mapped:
            return self.handed_over(messages, num_mapped, max_tokens)
        return self.native(tier, messages, max_tokens)

    def native(self, tier: str, messages: Messages, max_tokens: int) -> list[Step]:
        """Prefill everything natively."""
        return self._greedy(tier, self.prompt(messages), DynamicCache(), max_tokens)

    def handed_over(self, messages: Messages, num_mapped: int, max_tokens: int) -> list[Step]:
        """Run the large model over the small one's cache: head native, `num_mapped` tokens mapped, the rest native."""
        ids, cache = self.prompt(messages), DynamicCache()
        handed = mappers.replay(
            self.mapper, self.models["small"], self.models["large"], ids, HEAD + num_mapped, head=HEAD
        )
        for layer, (keys, values) in enumerate(zip(handed.keys, handed.values, strict=True)):
            cache.update(keys[None], values[None], layer)
        return self._greedy("large", ids, cache, max_tokens)

    def check(self, body: dict[str, Any], expected: Sequence[Step]) -> None:
        """Raise `WrongAnswer` unless tokens, log-probabilities and text of a chat completion are as expected, up to the
        first tie."""
        choice = body["choices"][0]
        content = choice["logprobs"]["content"]
        tokens = [one["token"] for one in content]
        for position, (got, step) in enumerate(zip(content, expected, strict=False)):
            if step.is_tie and got["token"] == step.second:
                return  # the answers differ from here on, and both are right
            where = f"token {position} of {tokens}"
            if got["token"] != step.token:
                raise WrongAnswer(f"{where}; expected {[one.token for one in expected]}")
            if abs(got["logprob"] - step.logprob) >= LOGPROB_TOLERANCE:
                raise WrongAnswer(f"{where}: log-probability {got['logprob']:.4f}; expected {step.logprob:.4f}")
        if len(content) != len(expected):
            raise WrongAnswer(f"{len(content)} tokens: {tokens}; expected {[one.token for one in expected]}")
        text = self.tokenizer.decode([step.id for step in expected], skip_special_tokens=True)
        if choice["message"]["content"] != text:
            raise WrongAnswer(f"text {choice['message']['content']!r}; expected {text!r}")

    @torch.inference_mode()
    def _greedy(self, tier: str, ids: list[int], cache: DynamicCache, max_tokens: int) -> list[Step]:
        """Decode greedily after `cache`, which holds the first tokens of `ids`, up to the end token."""
        model = self.models[tier]
        steps: list[Step] = []
        pending = ids[cache.get_seq_length() :]
        while len(steps) < max_tokens:
            out = model(input_ids=torch.tensor([pending]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            top = out.logits[0, -1].float().log_softmax(-1).topk(2)
            best, second = top.indices.tolist()
            if best == model.config.eos_token_id:
                break
            first_logprob, second_logprob = top.values.tolist()
            steps.append(Step(best, self._piece(best), first_logprob, self._piece(second), second_logprob))
            pending = [best]
        return steps

    def _piece(self, token_id: int) -> str:
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workers.reference", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", type=Path, required=True)
    parser.add_argument("--large", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    reference = Reference({"small": options.small, "large": options.large}, options.bundle)
    _write({"ready": True})
    for line in sys.stdin:
        question, wrong = json.loads(line), None
        expected = reference.expected(*(question[key] for key in ("tier", "messages", "mapped_tokens", "max_tokens")))
        try:
            reference.check(question["body"], expected)
        except WrongAnswer as error:
            wrong = str(error)
        _write({"wrong": wrong})
    return 0


def _write(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


if __name__ == "__main__":
    sys.exit(main())
