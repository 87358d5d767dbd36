"""What a right answer is, by plain transformers: over the native cache, and over the offline replay of a handoff."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import mappers
from tests.e2e.talks import Talk

HEAD, TAIL = 4, 64  # as handed over by default
TIE = 1e-4  # of log-probability: two tokens so close may come either way round
LOGPROB_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Step:
    """One greedy step: the likeliest token and the next one, with their log-probabilities."""

    id: int
    token: str
    logprob: float
    second: str
    second_logprob: float

    @property
    def is_tie(self) -> bool:
        return self.logprob - self.second_logprob < TIE


class Reference:
    """The models of each tier as plain transformers runs them, and the bundle between small and large."""

    def __init__(self, folders: Mapping[str, Path], bundle: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folders["small"])
        self.models = {tier: _load(folder) for tier, folder in folders.items()}
        self.mapper = mappers.load(bundle)

    def prompt(self, talk: Talk) -> list[int]:
        text = self.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def native(self, tier: str, talk: Talk, num_tokens: int) -> list[Step]:
        """The model reads everything itself."""
        return self._greedy(tier, self.prompt(talk), DynamicCache(), num_tokens)

    def handed_over(self, talk: Talk, num_mapped: int, num_tokens: int) -> list[Step]:
        """The large model over the small one's cache: head native, `num_mapped` tokens mapped, the rest native."""
        ids, cache = self.prompt(talk), DynamicCache()
        handed = mappers.replay(
            self.mapper, self.models["small"], self.models["large"], ids, HEAD + num_mapped, head=HEAD
        )
        for layer, (keys, values) in enumerate(zip(handed.keys, handed.values, strict=True)):
            cache.update(keys[None], values[None], layer)
        return self._greedy("large", ids, cache, num_tokens)

    def assert_right(self, body: dict[str, Any], expected: list[Step]) -> None:
        """The tokens, log-probabilities and text of a chat completion are the expected ones, up to a tie."""
        choice = body["choices"][0]
        told = choice["logprobs"]["content"]
        for position, (got, step) in enumerate(zip(told, expected, strict=False)):
            if step.is_tie and got["token"] == step.second:
                return  # from here on the two are different answers, and both right
            where = f"token {position} of {[one['token'] for one in told]}"
            assert got["token"] == step.token, f"{where}; expected {[one.token for one in expected]}"
            assert abs(got["logprob"] - step.logprob) < LOGPROB_TOLERANCE, f"{where}: {got}; expected {step}"
        assert len(told) == len(expected)
        text = self.tokenizer.decode([step.id for step in expected], skip_special_tokens=True)
        assert choice["message"]["content"] == text

    @torch.inference_mode()
    def _greedy(self, tier: str, ids: list[int], cache: DynamicCache, num_tokens: int) -> list[Step]:
        """Greedy decoding behind `cache`, which holds the first tokens of `ids`; ends before the end token."""
        model, steps = self.models[tier], []
        unread = ids[cache.get_seq_length() :]
        while len(steps) < num_tokens:
            out = model(input_ids=torch.tensor([unread]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            top = out.logits[0, -1].float().log_softmax(-1).topk(2)
            best, second = top.indices.tolist()
            if best == model.config.eos_token_id:
                break
            first_logprob, second_logprob = top.values.tolist()
            steps.append(Step(best, self._piece(best), first_logprob, self._piece(second), second_logprob))
            unread = [best]
        return steps

    def _piece(self, token_id: int) -> str:
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def differ(left: list[Step], right: list[Step]) -> bool:
    """Whether `assert_right` would tell the two answers apart."""
    return len(left) != len(right) or any(
        one.token != other.token or abs(one.logprob - other.logprob) > 2 * LOGPROB_TOLERANCE
        for one, other in zip(left, right, strict=True)
    )


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
