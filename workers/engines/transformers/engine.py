"""`TransformersEngine`: sequences over one Hugging Face model, run in bounded steps on the compute thread.

Each sequence prefills its prompt one chunk a step. All sequences decode together, one token each a step (`Batcher`).
Steps of equal priority run in order of arrival.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils.logging import disable_progress_bar

from mappers.cache import KVCache, KVGeometry
from mappers.errors import MapperError
from mappers.models import local_folder
from workers.api.config import SettingsError
from workers.engines.base import Engine, KVSource, ModelInfo, Sampling, Token, TokenSequence, describe_model
from workers.engines.scheduling import BACKGROUND, Admission, Batcher, Claim, Compute, set_compute_threads
from workers.engines.tokenizer import Tokenizer
from workers.engines.transformers.forward import attention_for, can_batch, decode, make_rowwise
from workers.engines.transformers.memory import BufferPool, WorkingMemory
from workers.rates import RateMeter
from workers.settings import WorkerSettings

R = TypeVar("R")

CHUNK_TOKENS = 256  # the longest step, and so the longest delay of a cancellation, a deadline or another request
MAX_BATCH = 8  # sequences in one decode step
MIN_TEMPERATURE = 1e-5  # lower temperatures would overflow the logits, and are greedy, as in vLLM


@dataclass(frozen=True)
class DecodeRow:
    """A sequence's part of a decode step: append its last generated token and choose the next one."""

    sequence: TransformersSequence
    token_id: int
    sampler: Sampler


class TransformersEngine(Engine):
    """Runs `model` on a compute thread of its own that uses `num_threads` of the CPU. `load` creates it."""

    name = "transformers"
    supports_logprobs = True

    def __init__(
        self, model: PreTrainedModel, info: ModelInfo, tokenizer: Tokenizer, admission: Admission, num_threads: int
    ):
        self.model = info
        self.tokenizer = tokenizer
        self.admission = admission
        self.rates = RateMeter()
        self.hf_model = model
        self.compute = Compute(on_start=lambda: _on_start(num_threads))
        self.buffers = BufferPool()
        self.batcher = Batcher(self._run_batch, MAX_BATCH if can_batch(model) else 1)

    @asynccontextmanager
    async def sequence(self, claim: Claim, capacity: int) -> AsyncIterator[TokenSequence]:
        sequence = TransformersSequence(self, claim, min(capacity, self.model.max_model_len))
        try:
            yield sequence
        finally:
            sequence.memory.free()

    async def aclose(self) -> None:
        self.compute.close()

    async def _run_batch(self, rows: Sequence[DecodeRow], priority: int) -> Sequence[Token | Exception]:
        return await self.compute.run(partial(self._decode, rows), priority=priority)

    def _decode(self, rows: Sequence[DecodeRow]) -> list[Token | Exception]:
        """Run one decode step. Runs on the compute thread."""
        started = time.perf_counter()
        logits = decode(self.hf_model, [row.sequence.memory for row in rows], [row.token_id for row in rows])
        for row, row_logits in zip(rows, logits, strict=True):
            row.sequence.append_decoded(row.token_id, row_logits)
        tokens: list[Token | Exception] = []
        for row, row_logits in zip(rows, logits, strict=True):
            try:
                tokens.append(row.sampler.choose(row_logits))
            except Exception as error:  # logits that are not numbers, say: it concerns this row alone
                tokens.append(error)
        self.rates.record("decode", 1, time.perf_counter() - started)  # as seen by one answer
        return tokens


class TransformersSequence(TokenSequence):
    """Checks the deadline before each step and queues it on the compute thread. If cancelled, waits for a running
    step."""

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
            buffers=engine.buffers,
        )
        self._logits: Tensor | None = None  # (vocab,), after the last token
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

    async def prefill(self, token_ids: Sequence[int]) -> None:
        for chunk in _chunks(token_ids):
            await self._step(partial(self._prefill, chunk))

    async def predict(self, token_ids: Sequence[int]) -> list[int]:
        predicted: list[int] = []
        for chunk in _chunks(token_ids):
            predicted += await self._step(partial(self._predict, chunk))
        return predicted

    async def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        return await self._step(partial(self._logprobs, token_ids))

    async def generate(self, sampling: Sampling, max_tokens: int) -> AsyncGenerator[Token, None]:
        sampler = Sampler(sampling, self._engine.hf_model.device)
        if self._logits is None:
            raise ValueError("generate needs a prefilled token to continue from")
        logits = self._logits
        token = await self._step(partial(sampler.choose, logits))
        yield token
        for _ in range(max_tokens - 1):
            self._claim.check()
            row = DecodeRow(self, token.id, sampler)
            token = await self._engine.batcher.join(row, priority=self._claim.priority)
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

    # The methods below run on the compute thread.

    def append_decoded(self, token_id: int, logits: Tensor) -> None:
        """Note a token that a decode step has added to `memory`. `logits` are `(vocab,)`."""
        self.token_ids.append(token_id)
        self._logits = logits

    def _prefill(self, token_ids: Sequence[int]) -> None:
        started, num_before = time.perf_counter(), self.num_tokens
        self._logits = self._forward(token_ids, num_logits=1)[-1]
        if self._claim.priority > BACKGROUND:  # background work prefills in smaller chunks
            self._engine.rates.record("prefill", len(token_ids), time.perf_counter() - started, length=num_before)

    def _predict(self, token_ids: Sequence[int]) -> list[int]:
        ids: list[int] = self._forward(token_ids, num_logits=len(token_ids)).argmax(dim=-1).tolist()
        return ids

    def _logprobs(self, token_ids: Sequence[int]) -> Tensor:
        return self._forward(token_ids, num_logits=len(token_ids)).float().log_softmax(dim=-1).cpu()

    def _forward(self, token_ids: Sequence[int], *, num_logits: int) -> Tensor:
        """Prefill `token_ids` and return the logits after the last `num_logits` of them, `(num_logits, vocab)`."""
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


class Sampler:
    """Chooses the tokens of one answer with transformers' logits warpers. With a seed, equal logits give equal
    tokens."""

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
        """Choose a token from logits `(vocab,)`."""
        logprobs = logits.float().log_softmax(dim=-1)
        token_id = int(logprobs.argmax()) if self._greedy else self._draw(logits.float())
        top: tuple[tuple[int, float], ...] = ()
        if self._num_top:
            values, ids = logprobs.topk(min(self._num_top, logprobs.shape[0]))
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return Token(token_id, float(logprobs[token_id]), top)

    def _draw(self, logits: Tensor) -> int:
        scores = self._warpers(torch.empty((1, 0), dtype=torch.long, device=logits.device), logits[None])
        return int(torch.multinomial(scores.softmax(dim=-1)[0], 1, generator=self._generator))


def load(settings: WorkerSettings) -> TransformersEngine:
    """Load the model and tokenizer of a worker, from a folder or a hub name. Raises `SettingsError`."""
    torch.set_num_threads(1)  # only the compute thread uses more
    disable_progress_bar()  # a worker's log is not a terminal
    try:
        folder = local_folder(settings.model)
        model = _load_model(settings, folder)
        info, tokenizer = describe_model(settings, folder, model.config, model.generation_config)
    except MapperError as error:
        raise SettingsError(f"worker {settings.id!r}: {error}") from error
    admission = Admission(max_running=settings.max_running, max_waiting=settings.max_queue)
    return TransformersEngine(model, info, tokenizer, admission, settings.num_threads)


def _load_model(settings: WorkerSettings, folder: Path) -> PreTrainedModel:
    device = torch.device(settings.device)
    num_devices = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= num_devices:
        raise SettingsError(
            f"worker {settings.id!r}: device {settings.device!r} does not exist; CUDA devices: {num_devices}"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, settings.dtype), attn_implementation=attention_for(device)
        )
    except (OSError, ValueError) as error:
        raise SettingsError(f"worker {settings.id!r}: cannot load model {settings.model!r}: {error}") from error
    loaded: PreTrainedModel = model.eval().requires_grad_(False).to(device)
    if can_batch(loaded):
        make_rowwise(loaded)
    return loaded


def _chunks(token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for begin in range(0, len(token_ids), CHUNK_TOKENS):
        yield token_ids[begin : begin + CHUNK_TOKENS]


def _on_start(num_threads: int) -> None:
    set_compute_threads(num_threads)
    torch.set_grad_enabled(False)  # affects this thread only
