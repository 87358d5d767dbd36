"""`SchedulerSide`: the connector in vLLM's scheduler.

    add_request      checks the tickets, once; blocks that are loaded get a salt of their own in vLLM's prefix cache
    num_loadable     how many tokens can be loaded beyond those that vLLM has; called often, looks nothing up
    blocks_assigned  the paged blocks that the tokens are loaded into
    plan_step        what the next step loads and saves
    end_step         the workers' results: failed loads, finished saves. vLLM computes what was not loaded; it is not
                     reported as loaded, nor found in vLLM's prefix cache as if it were
    finish           the report for the reply

Nothing here raises, whatever a request holds: an exception would end vLLM's engine. Failures are reported instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from workers.api.errors import KvrelayError
from workers.api.logs import exception_fields
from workers.api.schemas import KVLayout
from workers.engines.vllm.plan import (
    LoadOp,
    LoadTarget,
    PromptPart,
    PublishParams,
    SaveOp,
    StepWork,
    TransferReport,
    isolating_salt,
    parse_params,
    plan_load,
    provenance_of,
)
from workers.pool import create_arena, new_epoch
from workers.pool.blocks import blocks_for
from workers.pool.entries import EXACT, Hold, Lease, Span
from workers.pool.pool import Pool
from workers.pool.segment import reclaim_dead_segments
from workers.pool.tickets import TicketIssuer

log = logging.getLogger(__name__)

BlocksOf = Callable[[str], Sequence[int]]


def create_exchange(name: str, layout: KVLayout, budget_bytes: int, fingerprint: str) -> Pool:
    """Create the exchange: a pool in shared memory that holds published KV while it is leased.

    The scheduler owns it and the workers write into it, each the heads that it holds. They write only to blocks taken
    for that very save and not yet leased, so only the owner changes generations. Raises `PoolMemoryError` if it does
    not fit.
    """
    reclaim_dead_segments()
    arena = create_arena("shm", layout, budget_bytes, worker=name, epoch=new_epoch(), budget="exchange_bytes")
    return Pool(arena, fingerprint)


class EngineRequest(Protocol):
    """The used part of vLLM's `Request`."""

    request_id: str
    prompt_token_ids: list[int] | None
    num_computed_tokens: int
    cache_salt: str | None
    kv_transfer_params: Any


@dataclass
class PendingSave:
    """Blocks of the exchange that a step writes. `is_done` is None until the workers report."""

    hold: Hold
    is_done: bool | None = None


@dataclass
class RequestState:
    request: EngineRequest
    salt: str = ""
    parts: tuple[PromptPart, ...] = ()
    vllm_salt: str = ""  # of its blocks in vLLM's prefix cache
    publish: PublishParams | None = None
    refused: str | None = None
    load: LoadOp | None = None  # into the blocks assigned last
    is_loading: bool = False  # the next step loads it
    is_loaded: bool = False  # a step has loaded it
    is_broken: bool = False  # a step has failed to load it; it would fail again, so it is not offered again
    num_found: int = 0  # tokens that vLLM has from an earlier request under the same salt
    loaded_tokens: int = 0
    save: PendingSave | None = None

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt_token_ids or []

    @property
    def end(self) -> int:
        """End of the tokens that the parts may supply: at least one token is left to compute."""
        return min(self.parts[-1].end, len(self.prompt) - 1) if self.parts else 0

    @property
    def provenance(self) -> str:
        """The provenance of the parts that tokens were loaded from."""
        return provenance_of([part for part in self.parts if part.begin < self.loaded_tokens])

    def end_step(self, failed_blocks: Collection[int], block_tokens: int) -> bool:
        """Note which of its blocks a step could not load; vLLM computes the prompt from the first of them on. Returns
        whether there were any."""
        if self.load is None or self.is_loading:
            return False
        failed = [at for at, block in enumerate(self.load.blocks) if block in failed_blocks] if failed_blocks else []
        if failed:
            self.is_broken, self.refused = True, "a source could not be read, so the prompt was prefilled"
            self.loaded_tokens = min(self.loaded_tokens, failed[0] * block_tokens)
        self.is_loaded = not self.is_broken
        return bool(failed)


@dataclass
class _UnconfirmedLease:
    """A lease that was reported before the workers confirmed the save of its blocks."""

    lease: Lease
    hold: Hold = field(repr=False)


class SchedulerSide:
    """`target.pool` is the exchange. It holds published KV only while it is leased."""

    def __init__(self, target: LoadTarget, model: str, block_tokens: int):
        self._target = target
        self._block_tokens = block_tokens  # of vLLM's paged blocks
        self._tickets = TicketIssuer(target.pool, model)
        self._states: dict[str, RequestState] = {}
        self._unconfirmed: dict[str, _UnconfirmedLease] = {}
        self._orphaned: dict[str, Hold] = {}  # blocks that a step may still write for requests that have ended

    @property
    def pool(self) -> Pool:
        return self._target.pool

    @property
    def num_open(self) -> int:
        """Number of requests, and of ended ones whose blocks are still held."""
        return len(self._states) + len(self._unconfirmed) + len(self._orphaned)

    def add_request(self, request: EngineRequest) -> str | None:
        """Return the salt under which vLLM must cache this request's blocks, None if its own will do."""
        if request.kv_transfer_params is None:
            return None
        state = self._states[request.request_id] = RequestState(request)
        try:
            params = parse_params(request.kv_transfer_params)
            state.salt, state.publish = params.tenant_salt, params.publish
            for lease in params.release:
                self.pool.release(lease.cache_id, lease.lease_id)
            state.parts = plan_load(params, request.prompt_token_ids, self._target)
            if state.parts:
                state.vllm_salt = self._unshared(state, isolating_salt(request.cache_salt, params, state.end))
        except KvrelayError as error:
            state.refused = error.message
        except Exception as error:  # a bug here must not end the engine
            log.error("planning a request's kv_transfer_params failed: %s", exception_fields(error))
            state.parts, state.refused = (), f"internal error: {type(error).__name__}"
        return state.vllm_salt or None

    def num_loadable(self, request_id: str, num_computed: int) -> int:
        """Return the number of tokens that can be loaded after the first `num_computed`."""
        state = self._states.get(request_id)
        if state is None:
            return 0
        state.num_found = min(num_computed, state.end)
        return 0 if state.is_broken else state.end - state.num_found

    def blocks_assigned(self, request_id: str, blocks: Sequence[int], num_tokens: int) -> None:
        """Note that `num_tokens` of the loadable tokens go into the sequence's `blocks`."""
        state = self._states.get(request_id)
        if state is None or not state.parts:
            return
        state.loaded_tokens, state.is_loading = state.num_found + num_tokens, num_tokens > 0
        state.load = LoadOp(request_id, state.parts, state.end - num_tokens, state.end, tuple(blocks))

    def plan_step(self, scheduled: Mapping[str, int], blocks_of: BlocksOf) -> StepWork:
        """Plan a step. `scheduled` is the number of tokens that it computes of each request."""
        loads, saves = [], []
        for request_id, num_tokens in scheduled.items():
            state = self._states.get(request_id)
            if state is None:
                continue
            if state.load is not None and state.is_loading:
                loads.append(state.load)
                state.is_loading = False
            completes_prompt = state.request.num_computed_tokens + num_tokens >= len(state.prompt) > 0
            if state.publish is not None and state.save is None and completes_prompt:
                save = self._begin_save(state, blocks_of)
                saves += [save] if save else []
        return StepWork(tuple(loads), tuple(saves))

    def end_step(self, failed_blocks: Collection[int], saved: Mapping[str, bool]) -> list[EngineRequest]:
        """Take the workers' results: `failed_blocks` could not be loaded, `saved` says which saves succeeded.

        Returns the requests that computed something instead of loading it. No other request may find in vLLM's cache
        what it stores for them from now on, nor `failed_blocks`.
        """
        states = list(self._states.values())
        broken = [state.request for state in states if state.end_step(failed_blocks, self._block_tokens)]
        for request_id, is_done in saved.items():
            self._confirm(request_id, is_done)
        return broken

    def finish(self, request_id: str, *, is_whole: bool) -> dict[str, Any] | None:
        """Return the report of a request that ended. `is_whole` is false if it was aborted. None for a request without
        `kv_transfer_params`."""
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        report = TransferReport(loaded_tokens=state.loaded_tokens, refused=state.refused)
        if state.save is not None and is_whole:
            report = self._publish(state, state.save, report)
        elif state.save is not None:
            self._discard(request_id, state.save)
        return report.model_dump()

    def close(self) -> None:
        self.pool.close()

    def _unshared(self, state: RequestState, salt: str) -> str:
        """Return the salt, or one for this request alone while the load of another request with that salt may still
        fail: vLLM shares blocks before they are filled."""
        others = (other for other in self._states.values() if other is not state)
        is_open = any(other.vllm_salt == salt and not other.is_loaded for other in others)
        return f"{salt}/{state.request.request_id}" if is_open else salt

    def _begin_save(self, state: RequestState, blocks_of: BlocksOf) -> SaveOp | None:
        request_id, num_tokens = state.request.request_id, len(state.prompt)
        try:
            hold = self.pool.allocate(blocks_for(num_tokens, self.pool.layout.block_tokens))
        except KvrelayError as error:
            state.publish, state.refused = None, error.message
            return None
        state.save = PendingSave(hold)
        return SaveOp(request_id, num_tokens, tuple(blocks_of(request_id)), self.pool.export(), hold.blocks)

    def _confirm(self, request_id: str, is_done: bool) -> None:
        if (orphaned := self._orphaned.pop(request_id, None)) is not None:
            orphaned.release()
        elif (unconfirmed := self._unconfirmed.pop(request_id, None)) is not None:
            if not is_done:
                self.pool.release(unconfirmed.lease.entry.cache_id, unconfirmed.lease.lease_id)
            unconfirmed.hold.release()
        elif (state := self._states.get(request_id)) is not None and state.save is not None:
            state.save.is_done = is_done
            if not is_done:  # the load before it failed: the prompt is computed again, and saved then
                state.save.hold.release()
                state.save = None

    def _publish(self, state: RequestState, save: PendingSave, report: TransferReport) -> TransferReport:
        request_id = state.request.request_id
        try:
            lease = self._lease(state, save.hold)
        except KvrelayError as error:
            self._discard(request_id, save)
            return report.model_copy(update={"refused": error.message})
        if save.is_done is None:  # the workers' results of a step arrive after the replies that it produced
            self._unconfirmed[request_id] = _UnconfirmedLease(lease, save.hold)
        else:
            save.hold.release()
        return report.model_copy(update={"ticket": self._tickets.ticket(lease)})

    def _discard(self, request_id: str, save: PendingSave) -> None:
        if save.is_done is None:
            self._orphaned[request_id] = save.hold  # the step that writes into it may still run
        else:
            save.hold.release()

    def _lease(self, state: RequestState, hold: Hold) -> Lease:
        """Lease what was saved. The cache itself is dropped, so its blocks are freed with the lease. Whether its bundle
        is still in use is checked where the KV is stored: in the worker's own pool."""
        assert state.publish is not None, "only what is to be published is saved"
        ttl_s = state.publish.ttl_s
        entry = self.pool.put(
            hold.blocks,
            state.prompt,
            state.salt,
            ttl_s=ttl_s,
            provenance=state.provenance,
            mapped=None if state.provenance == EXACT else Span(0, len(state.prompt)),
        )
        lease = self.pool.lease(entry.cache_id, state.salt, ttl_s=ttl_s)
        self.pool.drop(entry.cache_id, state.salt)
        return lease
