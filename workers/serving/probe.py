"""How well an answer's model agrees with itself: the next tokens it expects over the cache that served the answer,
against those it writes after reading the same prompt in full."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from workers.engines.admission import Claim
from workers.engines.base import Engine, Sampling, TokenSequence


@dataclass(frozen=True)
class Agreement:
    """`top1_agreement`: share of teacher-forced tokens on which both expect the same next one.
    `full_prefill_ms`: the native reading, up to its first token."""

    top1_agreement: float
    full_prefill_ms: float


async def probe_agreement(
    engine: Engine, claim: Claim, served: TokenSequence, prompt: Sequence[int], num_tokens: int
) -> Agreement:
    """Greedily continue the prompt natively by up to `num_tokens`, and teacher-force `served` with that.

    `served` must begin with the prompt; it is cut back to it and then holds the probe's tokens.
    """
    num_tokens = min(num_tokens, engine.model.max_model_len - len(prompt))
    native, full_prefill_ms = await _native_continuation(engine, claim, prompt, num_tokens)
    served.truncate(len(prompt) - 1)
    expected = await served.predict([prompt[-1], *native[:-1]])
    agreed = sum(mine == theirs for mine, theirs in zip(expected, native, strict=True))
    return Agreement(agreed / len(native), full_prefill_ms)


async def _native_continuation(
    engine: Engine, claim: Claim, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], float]:
    written: list[int] = []
    first_ms = 0.0
    async with engine.sequence(claim, len(prompt) + num_tokens) as sequence:
        began = time.perf_counter()
        await sequence.read(prompt)
        async for token in sequence.generate(Sampling(), num_tokens):
            first_ms = first_ms or (time.perf_counter() - began) * 1e3
            written.append(token.id)
            if token.id in engine.model.eos_ids:
                break
    return written, first_ms
