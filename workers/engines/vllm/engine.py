"""`VllmEngine`: a worker's sequences over vLLM's asynchronous engine, which runs in a process of its own.

    load       noted: every request of the sequence names the source's location, and the connector reads it from there
    prefill    a request for one token, which is discarded: the prompt's KV stays in vLLM's cache
    generate   a request over all tokens so far: what was prefilled is found in vLLM's cache
    fetch      a request that makes the connector publish the prompt; the published copy is read back

Each reply reports how many tokens were loaded. Later requests do not load what vLLM had to prefill itself.

Each sequence has its own salt in vLLM's prefix cache: sequences share nothing there, and only its own sequence finds
what was loaded. Requests share KV through the worker's pool.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from mappers.cache import KVCache
from workers.api.errors import CacheStale, DeadlineExceeded, InvalidRequest, Overloaded, WorkerUnavailable
from workers.api.schemas import Ticket
from workers.digest import token_digest
from workers.engines.base import (
    MIN_LOADED_TOKENS,
    Engine,
    KVSource,
    ModelInfo,
    PoolLocation,
    Sampling,
    Token,
    TokenSequence,
)
from workers.engines.scheduling import BACKGROUND, Admission, Claim, Compute
from workers.engines.tokenizer import Tokenizer
from workers.engines.vllm.plan import LeaseRef, LoadPart, PublishParams, TransferParams, TransferReport
from workers.engines.vllm.worker import PoolReaders
from workers.pool.entries import new_cache_id
from workers.rates import RateMeter

log = logging.getLogger(__name__)

LEASE_S = 60.0  # published KV is read back at once, and released with the next request
WARM_UP_TOKENS, WARM_UP_S = 256, 240.0
MAX_ERROR_CHARS = 200  # of vLLM's message about a schema


class VllmEngine(Engine):
    """`llm` runs the model that `info` describes, with kvrelay's connector. `loading.load` creates it."""

    name = "vllm"
    response_formats = ("text", "json_object", "json_schema")

    def __init__(self, llm: AsyncLLM, info: ModelInfo, tokenizer: Tokenizer, admission: Admission, compute: Compute):
        self.model = info
        self.tokenizer = tokenizer
        self.admission = admission
        self.rates = RateMeter()
        self.compute = compute
        self.llm = llm
        self.sources = PoolReaders()  # of published KV
        self.unneeded: list[LeaseRef] = []  # released with the next request

    @asynccontextmanager
    async def sequence(self, claim: Claim, capacity: int) -> AsyncIterator[TokenSequence]:
        yield VllmSequence(self, claim)

    async def warm_up(self) -> None:
        """Run two requests. vLLM's first one takes seconds, too long for a handoff. The second measures the prefill
        rate, from which deadlines are set."""
        num_tokens = min(WARM_UP_TOKENS, self.model.max_model_len // 2)
        deadline = time.monotonic() + WARM_UP_S
        for seed in range(2):
            ids = [(seed + number) % self.model.vocab_size for number in range(num_tokens)]
            async with self.admit(priority=0 if seed else BACKGROUND, deadline=deadline) as claim:
                sequence = VllmSequence(self, claim)
                await sequence.prefill(ids)
                await sequence.fetch(0)

    async def aclose(self) -> None:
        self.llm.shutdown()  # on the loop that its sockets belong to
        self.compute.close()
        self.sources.close()

    async def run(
        self, token_ids: Sequence[int], sampling: SamplingParams, claim: Claim, salt: str
    ) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs for this prompt. Closing it early aborts the request.

        Raises `DeadlineExceeded`, and `WorkerUnavailable` if vLLM's process has ended. Then this process ends too, to
        be started again.
        """
        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": salt}
        request_id, priority = secrets.token_hex(8), -claim.priority  # vLLM runs the lowest first
        async with aclosing(self.llm.generate(prompt, sampling, request_id, priority=priority)) as outputs:
            try:
                while (output := await _next(outputs, claim)) is not None:
                    if claim.priority > BACKGROUND:
                        self.compute.busy_at = time.monotonic()
                    yield output
            except VLLMClientError as error:
                # A JSON schema is the only part of a request that is not checked before vLLM gets it.
                message = f"response_format.json_schema.schema: {str(error)[:MAX_ERROR_CHARS]}"
                raise InvalidRequest(message, param="response_format") from error
            except EngineDeadError as error:
                signal.raise_signal(signal.SIGTERM)
                raise WorkerUnavailable("the vLLM engine has ended") from error


class VllmSequence(TokenSequence):
    """This process's view of a sequence: its tokens, and where vLLM's process gets their KV."""

    def __init__(self, engine: VllmEngine, claim: Claim):
        self.token_ids = []
        self._engine = engine
        self._claim = claim
        self._salt = secrets.token_hex(32)
        self._source: LoadPart | None = None
        self._fetched: KVCache | None = None

    @property
    def num_loaded(self) -> int:
        return (self._source.num_tokens or 0) if self._source else 0

    async def load(self, token_ids: Sequence[int], source: KVSource) -> None:
        if self.num_tokens:
            raise ValueError(f"load into a sequence that holds {self.num_tokens} tokens; it must be empty")
        self._source = LoadPart(ticket=self._ticket(token_ids, source.location), num_tokens=len(token_ids))
        self.token_ids.extend(token_ids)

    async def prefill(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        num_before, num_loaded, started = self.num_tokens, self.num_loaded, time.perf_counter()
        await self._last_output([*self.token_ids, *token_ids], self._params())
        self.token_ids.extend(token_ids)
        if self._claim.priority > BACKGROUND:
            if self.num_loaded != num_loaded:  # the tokens that could not be loaded were prefilled along with these
                num_before = self.num_loaded
            seconds = time.perf_counter() - started
            self._engine.rates.record("prefill", self.num_tokens - num_before, seconds, length=num_before)

    async def predict(self, token_ids: Sequence[int]) -> list[int]:
        predicted: list[int] = []
        for token_id in token_ids:
            output = await self._last_output([*self.token_ids, token_id], self._params())
            self.token_ids.append(token_id)
            predicted.append(output.outputs[0].token_ids[0])
        return predicted

    async def generate(self, sampling: Sampling, max_tokens: int) -> AsyncGenerator[Token, None]:
        if not self.num_tokens:
            raise ValueError("generate needs a prefilled token to continue from")
        params = _sampling_params(sampling, max_tokens, self._params(), self._engine.model.eos_ids)
        last, started = None, time.perf_counter()
        async with aclosing(self._engine.run(self.token_ids, params, self._claim, self._salt)) as outputs:
            async for output in outputs:
                self._note_loaded(output)
                for token in _tokens(output, sampling.num_top):
                    if last is not None:
                        self.token_ids.append(last.id)
                        self._engine.rates.record("decode", 1, time.perf_counter() - started)
                    last, started = token, time.perf_counter()
                    yield token

    def truncate(self, num_tokens: int) -> None:
        del self.token_ids[num_tokens:]
        self._fetched = None
        self._limit_loaded(num_tokens)

    async def fetch(self, begin: int) -> None:
        params = self._params(publish=PublishParams(ttl_s=LEASE_S))
        output = await self._last_output(self.token_ids, params)
        report = TransferReport.model_validate(output.kv_transfer_params or {})
        if report.ticket is None:
            raise Overloaded(f"vLLM did not publish the KV of {self.num_tokens} tokens: {report.refused}")
        ticket = report.ticket
        try:
            read = partial(self._read_back, ticket, min(begin, self.num_loaded))
            self._fetched = await self._engine.compute.run(read, priority=self._claim.priority)
        except CacheStale as error:
            raise Overloaded(f"published KV was not read back in time: {error.message}") from error
        finally:
            self._engine.unneeded.append(LeaseRef(cache_id=ticket.cache_id, lease_id=ticket.lease_id))

    def kv(self, begin: int, end: int) -> KVCache:
        if self._fetched is None:
            raise ValueError("kv needs a fetch first")
        return self._fetched.slice(begin - self._fetched.start, end - self._fetched.start)

    def _read_back(self, ticket: Ticket, begin: int) -> KVCache:
        """Return a copy of the published KV. Runs on the compute thread."""
        kv = self._engine.sources.reader(ticket).read(ticket.blocks, ticket.generations, begin, ticket.num_tokens)
        return KVCache(tuple(key.clone() for key in kv.keys), tuple(value.clone() for value in kv.values), kv.start)

    def _ticket(self, token_ids: Sequence[int], location: PoolLocation) -> Ticket:
        """Describe blocks of this worker's own pool as a ticket for the connector, under this sequence's salt. They
        need no lease: the sequence's request holds them."""
        model = self._engine.model
        return Ticket(
            lease_id="",
            cache_id=new_cache_id(),
            pool=location.pool,
            layout=location.layout,
            blocks=list(location.blocks),
            generations=list(location.generations),
            token_ids=list(token_ids),
            num_tokens=len(token_ids),
            digest=token_digest(token_ids, self._salt),
            model=model.name,
            fingerprint=model.fingerprint,
            provenance="exact",
            expires_at=0.0,
        )

    def _params(self, publish: PublishParams | None = None) -> TransferParams | None:
        unneeded, self._engine.unneeded = self._engine.unneeded, []
        if not (self._source or publish or unneeded):
            return None
        load = [self._source] if self._source else []
        return TransferParams(tenant_salt=self._salt, load=load, publish=publish, release=unneeded)

    async def _last_output(self, token_ids: Sequence[int], params: TransferParams | None) -> Any:
        """Request the most likely token after these and return the last output."""
        sampling = _sampling_params(Sampling(), 1, params, frozenset())
        last = None
        async with aclosing(self._engine.run(token_ids, sampling, self._claim, self._salt)) as outputs:
            async for output in outputs:
                last = output
        if last is None:
            raise WorkerUnavailable("vLLM ended a request without an output")
        self._note_loaded(last)
        return last

    def _note_loaded(self, output: Any) -> None:
        """Lower `num_loaded` if a request's last output reports that fewer tokens were loaded."""
        if not output.finished or self._source is None:
            return
        report = TransferReport.model_validate(output.kv_transfer_params or {})
        offered = min(self.num_loaded, len(output.prompt_token_ids) - 1)
        if report.loaded_tokens < offered:
            log.warning("vLLM loaded %d of %d tokens: %s", report.loaded_tokens, offered, report.refused)
            self._limit_loaded(report.loaded_tokens)

    def _limit_loaded(self, num_tokens: int) -> None:
        """Load at most `num_tokens` from now on, and none if they are too few to be worth it."""
        if self._source is not None and num_tokens < self.num_loaded:
            limited = self._source.model_copy(update={"num_tokens": num_tokens})
            self._source = limited if num_tokens >= MIN_LOADED_TOKENS else None


async def _next(outputs: AsyncGenerator[Any, None], claim: Claim) -> Any | None:
    """Return the next output, None after the last one."""
    claim.check()
    remaining_s = None if claim.deadline is None else claim.deadline - time.monotonic()
    try:
        async with asyncio.timeout(remaining_s):
            return await anext(outputs, None)
    except TimeoutError as error:
        raise DeadlineExceeded("the deadline passed before the request was finished") from error


def _sampling_params(
    sampling: Sampling, max_tokens: int, params: TransferParams | None, eos_ids: frozenset[int]
) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_tokens=max_tokens,
        logprobs=sampling.num_top,
        ignore_eos=True,
        stop_token_ids=sorted(eos_ids),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": params.model_dump()} if params else None,
        structured_outputs=StructuredOutputsParams(json=dict(sampling.rules)) if sampling.rules is not None else None,
    )


def _tokens(output: Any, num_top: int) -> list[Token]:
    """Return an output's tokens. vLLM gives each the log-probabilities of the most likely tokens and of its own, by
    token id."""
    completion, tokens = output.outputs[0], []
    for token_id, logprobs in zip(completion.token_ids, completion.logprobs or [], strict=True):
        ranked = sorted(logprobs.items(), key=lambda item: item[1].rank)[:num_top]
        tokens.append(Token(token_id, logprobs[token_id].logprob, tuple((id, entry.logprob) for id, entry in ranked)))
    return tokens
