"""`VllmEngine`: a worker's sequences over vLLM's asynchronous engine, which runs in a process of its own.

    load(ids, source)   noted; every request of the sequence names the source's place, the connector reads it from there
    read(ids)           a request for one token, which is thrown away: its prompt is read and stays in vLLM's cache
    generate            a request over everything so far; what was read is found in vLLM's cache
    fetch               a request that has the connector publish the prompt; the published copy is read back

Each reply tells how much was loaded in truth. What vLLM had to read itself is not loaded by later requests either.

Each sequence has a salt of its own in vLLM's prefix cache: sequences share nothing there, and whatever was loaded is
found by its own sequence only. What requests share, they share through the worker's pool.
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

LENT_S = 60.0  # what is published is read back at once, and given back with the next request
WARM_UP_TOKENS, WARM_UP_S = 256, 240.0
SHOWN_CHARS = 200  # of what vLLM says of a schema


class VllmEngine(Engine):
    """`llm` runs the model that `info` describes, with kvrelay's connector. See `workers.engines.vllm.loading`."""

    name = "vllm"
    response_formats = ("text", "json_object", "json_schema")

    def __init__(self, llm: AsyncLLM, info: ModelInfo, tokenizer: Tokenizer, admission: Admission, compute: Compute):
        self.model = info
        self.tokenizer = tokenizer
        self.admission = admission
        self.rates = RateMeter()
        self.compute = compute
        self.llm = llm
        self.sources = PoolReaders()  # of what is published
        self.unneeded: list[LeaseRef] = []  # to be given back with the next request

    @asynccontextmanager
    async def sequence(self, claim: Claim, capacity: int) -> AsyncIterator[TokenSequence]:
        yield VllmSequence(self, claim)

    async def warm_up(self) -> None:
        """vLLM's first request takes seconds, and nobody who waits for a handoff has them. The second tells the rate of
        reading, by which deadlines are set."""
        num_tokens = min(WARM_UP_TOKENS, self.model.max_model_len // 2)
        deadline = time.monotonic() + WARM_UP_S
        for seed in range(2):
            ids = [(seed + number) % self.model.vocab_size for number in range(num_tokens)]
            async with self.admit(priority=0 if seed else BACKGROUND, deadline=deadline) as claim:
                sequence = VllmSequence(self, claim)
                await sequence.read(ids)
                await sequence.fetch(0)

    async def aclose(self) -> None:
        self.llm.shutdown()  # on the loop that its sockets belong to
        self.compute.close()
        self.sources.close()

    async def run(
        self, token_ids: Sequence[int], sampling: SamplingParams, claim: Claim, salt: str
    ) -> AsyncGenerator[Any, None]:
        """vLLM's outputs for this prompt. Left early, the request is aborted. Raises `DeadlineExceeded`, and
        `WorkerUnavailable` when vLLM's process has ended: so does this one then, to be started again."""
        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": salt}
        request_id, priority = secrets.token_hex(8), -claim.priority  # vLLM runs the lowest first
        async with aclosing(self.llm.generate(prompt, sampling, request_id, priority=priority)) as outputs:
            try:
                while (output := await _next(outputs, claim)) is not None:
                    if claim.priority > BACKGROUND:
                        self.compute.busy_at = time.monotonic()
                    yield output
            except VLLMClientError as error:
                raise _refused(error) from error
            except EngineDeadError as error:
                signal.raise_signal(signal.SIGTERM)
                raise WorkerUnavailable("the vLLM engine has ended") from error


class VllmSequence(TokenSequence):
    """What is known of a sequence here: its tokens, and how vLLM's process comes by their KV."""

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
        self._source = LoadPart(ticket=self._ticket(token_ids, source.place), num_tokens=len(token_ids))
        self.token_ids.extend(token_ids)

    async def read(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        before, loaded, began = self.num_tokens, self.num_loaded, time.perf_counter()
        await self._last_output([*self.token_ids, *token_ids], self._params())
        self.token_ids.extend(token_ids)
        if self._claim.priority > BACKGROUND:
            before = before if self.num_loaded == loaded else self.num_loaded  # the rest was read along with these
            seconds = time.perf_counter() - began
            self._engine.rates.record("prefill", self.num_tokens - before, seconds, length=before)

    async def predict(self, token_ids: Sequence[int]) -> list[int]:
        predicted: list[int] = []
        for token_id in token_ids:
            output = await self._last_output([*self.token_ids, token_id], self._params())
            self.token_ids.append(token_id)
            predicted.append(output.outputs[0].token_ids[0])
        return predicted

    async def generate(self, sampling: Sampling, max_tokens: int) -> AsyncGenerator[Token, None]:
        if not self.num_tokens:
            raise ValueError("nothing was read yet: a token can only follow another")
        sampled = _sampling(sampling, max_tokens, self._params(), self._engine.model.eos_ids)
        last, began = None, time.perf_counter()
        async with aclosing(self._engine.run(self.token_ids, sampled, self._claim, self._salt)) as outputs:
            async for output in outputs:
                self._note_loaded(output)
                for token in _tokens(output, sampling.num_top):
                    if last is not None:
                        self.token_ids.append(last.id)
                        self._engine.rates.record("decode", 1, time.perf_counter() - began)
                    last, began = token, time.perf_counter()
                    yield token

    def truncate(self, num_tokens: int) -> None:
        del self.token_ids[num_tokens:]
        self._fetched = None
        self._load_at_most(num_tokens)

    async def fetch(self, begin: int) -> None:
        params = self._params(publish=PublishParams(ttl_s=LENT_S))
        output = await self._last_output(self.token_ids, params)
        report = TransferReport.model_validate(output.kv_transfer_params or {})
        if report.ticket is None:
            raise Overloaded(f"the KV of {self.num_tokens} tokens was not published: {report.refused}")
        ticket = report.ticket
        try:
            read = partial(self._read_back, ticket, min(begin, self.num_loaded))
            self._fetched = await self._engine.compute.run(read, priority=self._claim.priority)
        except CacheStale as error:
            raise Overloaded(f"what was published was not read back in time: {error.message}") from error
        finally:
            self._engine.unneeded.append(LeaseRef(cache_id=ticket.cache_id, lease_id=ticket.lease_id))

    def kv(self, begin: int, end: int) -> KVCache:
        if self._fetched is None:
            raise ValueError("nothing was fetched")
        return self._fetched.slice(begin - self._fetched.start, end - self._fetched.start)

    def _read_back(self, ticket: Ticket, begin: int) -> KVCache:
        """A copy of its own. Runs on the compute thread."""
        kv = self._engine.sources.reader(ticket).read(ticket.blocks, ticket.generations, begin, ticket.num_tokens)
        return KVCache(tuple(key.clone() for key in kv.keys), tuple(value.clone() for value in kv.values), kv.start)

    def _ticket(self, token_ids: Sequence[int], place: PoolLocation) -> Ticket:
        """A place in our own pool as the connector takes it: under this sequence's salt, and held by its request."""
        model = self._engine.model
        return Ticket(
            lease_id="",
            cache_id=new_cache_id(),
            pool=place.pool,
            layout=place.layout,
            blocks=list(place.blocks),
            generations=list(place.generations),
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
        """The last output of a request for the most likely token after these."""
        sampled = _sampling(Sampling(), 1, params, frozenset())
        last = None
        async with aclosing(self._engine.run(token_ids, sampled, self._claim, self._salt)) as outputs:
            async for output in outputs:
                last = output
        if last is None:
            raise WorkerUnavailable("vLLM ended a request without an answer")
        self._note_loaded(last)
        return last

    def _note_loaded(self, output: Any) -> None:
        """The last output of a request tells what of the source it was made of."""
        if not output.finished or self._source is None:
            return
        report = TransferReport.model_validate(output.kv_transfer_params or {})
        offered = min(self.num_loaded, len(output.prompt_token_ids) - 1)
        if report.loaded_tokens < offered:
            log.warning("of %d tokens %d were loaded: %s", offered, report.loaded_tokens, report.refused)
            self._load_at_most(report.loaded_tokens)

    def _load_at_most(self, num_tokens: int) -> None:
        """From now on; nothing, where so few are not worth it."""
        if self._source is not None and num_tokens < self.num_loaded:
            at_most = self._source.model_copy(update={"num_tokens": num_tokens})
            self._source = at_most if num_tokens >= MIN_LOADED_TOKENS else None


async def _next(outputs: AsyncGenerator[Any, None], claim: Claim) -> Any | None:
    """The next output, None after the last one."""
    claim.check()
    remaining_s = None if claim.deadline is None else claim.deadline - time.monotonic()
    try:
        async with asyncio.timeout(remaining_s):
            return await anext(outputs, None)
    except TimeoutError as error:
        raise DeadlineExceeded("the request's deadline passed before its work was done") from error


def _sampling(
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


def _refused(error: VLLMClientError) -> InvalidRequest:
    """Of what a request says, only a JSON schema has not been looked at before it comes to vLLM."""
    return InvalidRequest(f"response_format.json_schema.schema: {str(error)[:SHOWN_CHARS]}", param="response_format")


def _tokens(output: Any, num_top: int) -> list[Token]:
    """The tokens that an output brings, with what vLLM says of each."""
    completion = output.outputs[0]
    return [
        _token(token_id, entry, num_top)
        for token_id, entry in zip(completion.token_ids, completion.logprobs or [], strict=True)
    ]


def _token(token_id: int, entry: Any, num_top: int) -> Token:
    """`entry` holds the log-probabilities of the most likely tokens and of the one drawn, by token id."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]
    return Token(token_id, entry[token_id].logprob, tuple((other, known.logprob) for other, known in ranked))
