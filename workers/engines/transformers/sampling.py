"""`Sampler`: one token out of logits, by transformers' own warpers."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from workers.engines.base import Sampling, Token

MIN_TEMPERATURE = 1e-5  # below it, logits that are divided by it are numbers no more; so it is greedy, as in vLLM


class Sampler:
    """Draws the tokens of one answer. With a seed, the same logits give the same tokens."""

    def __init__(self, sampling: Sampling, device: torch.device):
        self._greedy = sampling.temperature < MIN_TEMPERATURE
        self._num_top = sampling.num_top
        self._warpers = LogitsProcessorList()
        if not self._greedy and sampling.temperature != 1:
            self._warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if not self._greedy and sampling.top_p < 1:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> Token:
        """`logits` is `(vocab,)`."""
        logprobs = logits.float().log_softmax(dim=-1)
        token_id = int(logprobs.argmax()) if self._greedy else self._draw(logits.float())
        return Token(token_id, float(logprobs[token_id]), _top(logprobs, self._num_top))

    def _draw(self, logits: Tensor) -> int:
        scores = self._warpers(torch.empty((1, 0), dtype=torch.long, device=logits.device), logits[None])
        return int(torch.multinomial(scores.softmax(dim=-1)[0], 1, generator=self._generator))


def _top(logprobs: Tensor, num_top: int) -> tuple[tuple[int, float], ...]:
    if not num_top:
        return ()
    values, ids = logprobs.topk(min(num_top, logprobs.shape[0]))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))
