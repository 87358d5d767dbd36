"""`SchedulerSide`: the connector in vLLM's scheduler.

    arrived    the tickets are checked, once; what is loaded gets a salt of its own in vLLM's prefix cache
    matched    how many tokens it may count on beyond those that it has; asked again and again, looked up never
    allocated  the paged blocks that they go into
    step       what the next step loads, and saves
    settled    what the workers say of the step: loads that failed, saves that are done; what was not loaded is read
               by vLLM, and neither told as loaded nor ever found by others as if it were
    finished   the report that goes into the reply

Whatever a request brings, nothing here raises: vLLM's engine would end with it. What cannot be done is reported.
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
    TransferParams,
    TransferReport,
    check_prompt,
    isolating_salt,
    parse,
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


class EngineRequest(Protocol):
    """What is used of vLLM's `Request`."""

    request_id: str
    prompt_token_ids: list[int] | None
    num_computed_tokens: int
    cache_salt: str | None
    kv_transfer_params: Any


@dataclass
class PendingSave:
    """Blocks of the exchange that a step writes. `is_done` is None until the workers have told."""

    hold: Hold
    is_done: bool | None = None


@dataclass
class RequestState:
    request: EngineRequest
    salt: str = ""
    parts: tuple[PromptPart, ...] = ()
    kept_under: str = ""  # vLLM's salt for it
    publish: PublishParams | None = None
    refused: str | None = None
    load: LoadOp | None = None  # into the blocks that were allocated last
    is_loading: bool = False  # the next step is to do it
    is_loaded: bool = False  # a step has done it
    is_broken: bool = False  # a step has failed to: what failed once would fail for ever, and is not offered again
    found: int = 0  # tokens of it that vLLM has from an earlier request, under the same salt
    loaded_tokens: int = 0
    saving: PendingSave | None = None

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt_token_ids or []

    @property
    def end(self) -> int:
        """Up to where the parts may be used: at least one token is left to compute."""
        return min(self.parts[-1].end, len(self.prompt) - 1) if self.parts else 0

    @property
    def provenance(self) -> str:
        """That of the parts which something was loaded from."""
        return provenance_of([part for part in self.parts if part.begin < self.loaded_tokens])

    def settle(self, failed_blocks: Collection[int], block_tokens: int) -> bool:
        """A step is over, and these blocks could not be loaded; whether some of them are this request's. What was to
        be loaded from there on is computed instead."""
        if self.load is None or self.is_loading:
            return False
        lost = [at for at, block in enumerate(self.load.blocks) if block in failed_blocks] if failed_blocks else []
        if lost:
            self.is_broken, self.refused = True, "a source could not be read, so the prompt was"
            self.loaded_tokens = min(self.loaded_tokens, lost[0] * block_tokens)
        self.is_loaded = not self.is_broken
        return bool(lost)


def create_exchange(name: str, layout: KVLayout, budget_bytes: int, fingerprint: str) -> Pool:
    """A pool in shared memory. Raises `PoolMemoryError` where it does not fit."""
    reclaim_dead_segments()
    arena = create_arena(
        "shm", layout, budget_bytes, worker=name, epoch=new_epoch(), budget="exchange_bytes"
    )
    return Pool(arena, fingerprint)


@dataclass
class _UnconfirmedLease:
    """A lease that was told before the workers have confirmed what it lends."""

    lease: Lease
    hold: Hold = field(repr=False)


class SchedulerSide:
    """`pool` is the exchange: what is published stands there, and only as long as it is lent."""

    def __init__(self, target: LoadTarget, model: str, block_tokens: int):
        self._target = target
        self._block_tokens = block_tokens  # of vLLM's paged blocks
        self._tickets = TicketIssuer(target.pool, model)
        self._states: dict[str, RequestState] = {}
        self._unconfirmed: dict[str, _UnconfirmedLease] = {}
        self._late: dict[str, Hold] = {}  # of requests that ended while a step wrote for them

    @property
    def pool(self) -> Pool:
        return self._target.pool

    @property
    def num_open(self) -> int:
        """Requests, and blocks of ended ones, that something is still kept for."""
        return len(self._states) + len(self._unconfirmed) + len(self._late)

    def arrived(self, request: EngineRequest) -> str | None:
        """The salt under which vLLM must keep this request's blocks, None if its own will do."""
        if request.kv_transfer_params is None:
            return None
        state = self._states[request.request_id] = RequestState(request)
        try:
            params = parse(request.kv_transfer_params)
            state.salt, state.publish = params.tenant_salt, params.publish
            self._release(params)
            state.parts = plan_load(params, check_prompt(request.prompt_token_ids), self._target)
            if state.parts:
                state.kept_under = self._own_salt(state, isolating_salt(request.cache_salt, params, state.end))
        except KvrelayError as error:
            state.refused = error.message
        except Exception as error:  # a bug of ours must not end the engine
            log.error("a request's kv_transfer_params were not understood: %s", exception_fields(error))
            state.parts, state.refused = (), f"internal error: {type(error).__name__}"
        return state.kept_under or None

    def matched(self, request_id: str, num_computed: int) -> int:
        """Tokens to be loaded behind the first `num_computed`. Synchronously, so nothing is ever waited for."""
        state = self._states.get(request_id)
        if state is None:
            return 0
        state.found = min(num_computed, state.end)
        return 0 if state.is_broken else state.end - state.found

    def allocated(self, request_id: str, blocks: Sequence[int], num_tokens: int) -> None:
        """`num_tokens` of what `matched` offered go into the sequence's `blocks`."""
        state = self._states.get(request_id)
        if state is None or not state.parts:
            return
        state.loaded_tokens, state.is_loading = state.found + num_tokens, num_tokens > 0
        state.load = LoadOp(request_id, state.parts, state.end - num_tokens, state.end, tuple(blocks))

    def step(self, scheduled: Mapping[str, int], blocks_of: BlocksOf) -> StepWork:
        """For a step that computes so many tokens of each request."""
        loads, saves = [], []
        for request_id, num_tokens in scheduled.items():
            state = self._states.get(request_id)
            if state is None:
                continue
            if state.load is not None and state.is_loading:
                loads.append(state.load)
                state.is_loading = False
            if self._is_whole(state, num_tokens) and (save := self._begin_save(state, blocks_of)):
                saves.append(save)
        return StepWork(tuple(loads), tuple(saves))

    def settled(self, failed_blocks: Collection[int], saved: Mapping[str, bool]) -> list[EngineRequest]:
        """`failed_blocks` could not be loaded; of `saved` each save tells whether it was done. The requests that
        computed something instead: what vLLM keeps of them from now on must be found by nobody, and `failed_blocks`
        neither."""
        states = list(self._states.values())
        broken = [state.request for state in states if state.settle(failed_blocks, self._block_tokens)]
        for request_id, is_done in saved.items():
            self._confirm(request_id, is_done)
        return broken

    def finished(self, request_id: str, *, is_whole: bool) -> dict[str, Any] | None:
        """The report of a request that ended; `is_whole` unless it was aborted. None for one that asked nothing."""
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        report = TransferReport(loaded_tokens=state.loaded_tokens, refused=state.refused)
        if state.saving is not None and is_whole:
            report = self._published(state, state.saving, report)
        elif state.saving is not None:
            self._let_go(request_id, state.saving)
        return report.model_dump()

    def close(self) -> None:
        self.pool.close()

    def _own_salt(self, state: RequestState, salt: str) -> str:
        """The salt, or one for this request alone while another that has it may find that nothing can be loaded: vLLM
        shares blocks before they are filled."""
        others = (other for other in self._states.values() if other is not state)
        is_open = any(other.kept_under == salt and not other.is_loaded for other in others)
        return f"{salt}/{state.request.request_id}" if is_open else salt

    def _is_whole(self, state: RequestState, num_scheduled: int) -> bool:
        return (
            state.publish is not None
            and state.saving is None
            and state.request.num_computed_tokens + num_scheduled >= len(state.prompt) > 0
        )

    def _begin_save(self, state: RequestState, blocks_of: BlocksOf) -> SaveOp | None:
        request_id, num_tokens = state.request.request_id, len(state.prompt)
        try:
            hold = self.pool.allocate(blocks_for(num_tokens, self.pool.layout.block_tokens))
        except KvrelayError as error:
            state.publish, state.refused = None, error.message
            return None
        state.saving = PendingSave(hold)
        return SaveOp(request_id, num_tokens, tuple(blocks_of(request_id)), self.pool.export(), hold.blocks)

    def _confirm(self, request_id: str, is_done: bool) -> None:
        if (late := self._late.pop(request_id, None)) is not None:
            late.release()
        elif (published := self._unconfirmed.pop(request_id, None)) is not None:
            if not is_done:
                self.pool.release(published.lease.entry.cache_id, published.lease.lease_id)
            published.hold.release()
        elif (state := self._states.get(request_id)) is not None and state.saving is not None:
            state.saving.is_done = is_done
            if not is_done:  # the load before it failed: the prompt is computed anew, and saved then
                state.saving.hold.release()
                state.saving = None

    def _published(self, state: RequestState, saving: PendingSave, report: TransferReport) -> TransferReport:
        request_id = state.request.request_id
        try:
            lease = self._lend(state, saving.hold)
        except KvrelayError as error:
            self._let_go(request_id, saving)
            return report.model_copy(update={"refused": error.message})
        if saving.is_done is None:  # the workers' word on a step comes after the replies that it made
            self._unconfirmed[request_id] = _UnconfirmedLease(lease, saving.hold)
        else:
            saving.hold.release()
        return report.model_copy(update={"ticket": self._tickets.ticket(lease)})

    def _let_go(self, request_id: str, saving: PendingSave) -> None:
        if saving.is_done is None:
            self._late[request_id] = saving.hold  # the step that writes into it may still run
        else:
            saving.hold.release()

    def _lend(self, state: RequestState, hold: Hold) -> Lease:
        """A lease on what was saved; the cache itself is forgotten, so that it goes when the lease does. Whether the
        bundle that it came from is still used is asked where it is kept: in the worker's own pool."""
        assert state.publish is not None, "what is saved was to be published"
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

    def _release(self, params: TransferParams) -> None:
        for lent in params.release:
            self.pool.release(lent.cache_id, lent.lease_id)
