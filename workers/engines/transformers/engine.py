"""`TransformersEngine`: sequences over one model, one bounded step at a time on the compute thread.

A prompt is read a chunk a step, each sequence for itself; the tokens of answers are written by all of them together, a
round a step (`workers.engines.rounds`). Steps of equal priority run in the order in which they came.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mappers.cache import KVCache, KVGeometry
from workers.engines.admission import Admission, Claim
from workers.engines.base import Engine, KVSource, ModelInfo, Sampling, Token, TokenSequence
from workers.engines.compute import BACKGROUND, Compute
from workers.engines.rates import RateMeter
from workers.engines.rounds import Rounds
from workers.engines.threads import share_out_here
from workers.engines.tokenizer import Tokenizer
from workers.engines.transformers.batch import can_batch, decode
from workers.engines.transformers.memory import WorkingMemory
from workers.engines.transformers.rooms import Rooms
from workers.engines.transformers.sampling import Sampler

R = TypeVar("R")

CHUNK_TOKENS = 256  # the longest step: what a hang-up, a deadline or another request waits for at most
MAX_ROWS = 8  # answers that go on in one round


@dataclass(frozen=True)
class Row:
    """What a sequence wants of a round: to read the token that was written last, and to choose the next one."""

    sequence: TransformersSequence
    token_id: int
    sampler: Sampler


class TransformersEngine(Engine):
    """Runs `model` on a thread of its own with `num_threads` of the CPU. See `workers.engines.transformers.loading`."""

    name = "transformers"
    tells_distributions = True

    def __init__(
        self, model: PreTrainedModel, info: ModelInfo, tokenizer: Tokenizer, admission: Admission, num_threads: int
    ):
        self.model = info
        self.tokenizer = tokenizer
        self.admission = admission
        self.rates = RateMeter()
        self.hf_model = model
        self.compute = Compute(on_start=lambda: _on_start(num_threads))
        self.rooms = Rooms()
        self.rounds = Rounds(self._run_round, MAX_ROWS if can_batch(model) else 1)

    @asynccontextmanager
    async def sequence(self, claim: Claim, capacity: int) -> AsyncIterator[TokenSequence]:
        sequence = TransformersSequence(self, claim, min(capacity, self.model.max_model_len))
        try:
            yield sequence
        finally:
            sequence.memory.free()

    async def aclose(self) -> None:
        self.compute.close()

    async def _run_round(self, rows: Sequence[Row], priority: int) -> Sequence[Token | Exception]:
        return await self.compute.run(partial(self._decode, rows), priority=priority)

    def _decode(self, rows: Sequence[Row]) -> list[Token | Exception]:
        """A round. Runs on the compute thread."""
        began = time.perf_counter()
        logits = decode(self.hf_model, [row.sequence.memory for row in rows], [row.token_id for row in rows])
        for row, of_row in zip(rows, logits, strict=True):
            row.sequence.note_read(row.token_id, of_row)
        tokens = [_chosen(row.sampler, of_row) for row, of_row in zip(rows, logits, strict=True)]
        self.rates.record("decode", 1, time.perf_counter() - began)  # what one answer sees
        return tokens


class TransformersSequence(TokenSequence):
    """Each step checks the deadline and queues for the compute thread. Cancelled, it waits out a running step."""

    def __init__(self, engine: TransformersEngine, claim: Claim, capacity: int):
        self.token_ids = []
        self._engine = engine
        self._claim = claim
        layout = engine.model.layout
        self.memory = WorkingMemory(
            KVGeometry(layout.num_layers, layout.num_kv_heads, layout.head_dim),
            capacity,
            dtype=engine.hf_model.dtype,
            device=engine.hf_model.device,
            limit=engine.model.max_model_len,
            rooms=engine.rooms,
        )
        self._logits: Tensor | None = None  # (vocab,), of the token read last
        self._num_loaded = 0

    @property
    def num_loaded(self) -> int:
        return self._num_loaded

    async def load(self, token_ids: Sequence[int], source: KVSource) -> None:
        if self.num_tokens:
            raise ValueError(f"load into a sequence that holds {self.num_tokens} tokens; it must be empty")
        self.memory.reserve(len(token_ids))
        await self._step(lambda: source(self.memory.kv(0, len(token_ids))))
        self.memory.resize(len(token_ids))
        self.token_ids.extend(token_ids)
        self._num_loaded = len(token_ids)

    async def read(self, token_ids: Sequence[int]) -> None:
        for chunk in _chunks(token_ids):
            await self._step(partial(self._prefill, chunk))

    async def predict(self, token_ids: Sequence[int]) -> list[int]:
        predicted: list[int] = []
        for chunk in _chunks(token_ids):
            predicted += await self._step(partial(self._most_likely, chunk))
        return predicted

    async def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        return await self._step(partial(self._distributions, token_ids))

    async def generate(self, sampling: Sampling, max_tokens: int) -> AsyncGenerator[Token, None]:
        sampler = Sampler(sampling, self._engine.hf_model.device)
        if self._logits is None:
            raise ValueError("nothing was read yet: a token can only follow another")
        logits = self._logits
        token = await self._step(partial(sampler.choose, logits))
        yield token
        for _ in range(max_tokens - 1):
            self._claim.check()
            row = Row(self, token.id, sampler)
            token = await self._engine.rounds.join(row, priority=self._claim.priority)
            yield token

    def truncate(self, num_tokens: int) -> None:
        self.memory.resize(num_tokens)
        del self.token_ids[num_tokens:]
        self._num_loaded = min(self._num_loaded, num_tokens)
        self._logits = None

    def kv(self, begin: int, end: int) -> KVCache:
        return self.memory.kv(begin, end)

    async def _step(self, step: Callable[[], R]) -> R:
        self._claim.check()
        return await self._engine.compute.run(step, priority=self._claim.priority)

    # What follows runs on the compute thread.

    def _prefill(self, token_ids: Sequence[int]) -> None:
        began, before = time.perf_counter(), self.num_tokens
        self._logits = self._forward(token_ids, num_logits=1)[-1]
        if self._claim.priority > BACKGROUND:  # which reads in smaller chunks
            self._engine.rates.record("prefill", len(token_ids), time.perf_counter() - began, length=before)

    def note_read(self, token_id: int, logits: Tensor) -> None:
        """A round has read this token into `memory`; `logits` are `(vocab,)`."""
        self.token_ids.append(token_id)
        self._logits = logits

    def _most_likely(self, token_ids: Sequence[int]) -> list[int]:
        ids: list[int] = self._forward(token_ids, num_logits=len(token_ids)).argmax(dim=-1).tolist()
        return ids

    def _distributions(self, token_ids: Sequence[int]) -> Tensor:
        return self._forward(token_ids, num_logits=len(token_ids)).float().log_softmax(dim=-1).cpu()

    def _forward(self, token_ids: Sequence[int], *, num_logits: int) -> Tensor:
        """Read `token_ids`; logits after the last `num_logits` of them, `(num_logits, vocab)`."""
        begin = self.num_tokens
        end = begin + len(token_ids)
        self.memory.reserve(end)
        model = self._engine.hf_model
        output = model(
            input_ids=torch.tensor([token_ids], device=model.device),
            position_ids=torch.arange(begin, end, device=model.device)[None],
            past_key_values=self.memory.cache,
            use_cache=True,
            logits_to_keep=num_logits,
        )
        self.token_ids.extend(token_ids)
        logits: Tensor = output.logits[0]
        return logits


def _chunks(token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for begin in range(0, len(token_ids), CHUNK_TOKENS):
        yield token_ids[begin : begin + CHUNK_TOKENS]


def _chosen(sampler: Sampler, logits: Tensor) -> Token | Exception:
    """What goes wrong here, by logits that are no numbers say, is this answer's own affair."""
    try:
        return sampler.choose(logits)
    except Exception as error:
        return error


def _on_start(num_threads: int) -> None:
    share_out_here(num_threads)
    torch.set_grad_enabled(False)  # for this thread only
