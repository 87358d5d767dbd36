"""`Pool`: the one owner of a worker's blocks and of the caches in them.

    pool = Pool(create_arena("shm", layout, budget_bytes, worker="small-0", epoch=new_epoch()), model.fingerprint)
    with pool.match_prefix(ids, salt) as prefix, pool.allocate(3) as fresh:      # blocks in use by this request
        pool.scatter(fresh.blocks, kv)                                           # written here, then never again
        entry = pool.put(prefix.blocks + fresh.blocks, ids, salt, ttl_s=300)     # a cache, found by id or by prefix
    lease = pool.lease(entry.cache_id, salt, ttl_s=10)                           # another worker reads it

A block stands as long as somebody uses it: each cache, hold and lease counts as one user. When the last goes, the
block's generation turns odd at once, so that no late reader takes it for what it was, and a thread zeroes it.

Safe from any thread: one lock guards the tables and is held for table work only. Copies (`PoolMemory`) and clearing
run outside it, on blocks that nobody else writes; run copies off the event loop. Tenants, tokens and provenance are
checked here.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence

from mappers.cache import KVCache
from workers.api.errors import BundleUnusable, CacheMismatch, CacheNotFound, InvalidRequest, Overloaded, PoolFull
from workers.api.schemas import Provenance
from workers.digest import KVIdentity, block_chain, token_digest
from workers.pool.arena import Arena, PoolMemory
from workers.pool.blocks import blocks_for, check_blocks
from workers.pool.entries import EXACT, LEASE_EVENTS, CacheEntry, Hold, Lease, PoolStats, Span, new_cache_id
from workers.pool.tables import BlockLedger, PrefixIndex, choose_victims

MAX_LEASES = 1024
_CLEAR_TIMEOUT_S = 5.0
CLEAR_BATCH = 4  # blocks zeroed at a time: short enough that whoever waits for them hardly notices


class Pool(PoolMemory):
    """Blocks of one model, the one whose weights have `fingerprint`."""

    def __init__(
        self,
        arena: Arena,
        fingerprint: str,
        *,
        clock: Callable[[], float] = time.time,
        max_leases: int = MAX_LEASES,
    ):
        super().__init__(arena)
        self.fingerprint = fingerprint
        self._clock = clock
        self._max_leases = max_leases
        self._ledger = BlockLedger(arena.num_blocks)
        self._index = PrefixIndex()
        self._entries: OrderedDict[str, CacheEntry] = OrderedDict()  # least recently used first
        self._leases: dict[str, Lease] = {}
        self._successors: dict[str, str] = {}  # ids of mapped caches, to the exact ones that took their places
        self._barred: set[Provenance] = set()
        self._next_expiry = math.inf  # nothing ends before
        self._num_evictions = 0
        self._lease_events = dict.fromkeys(LEASE_EVENTS, 0)
        self._changed = threading.Condition(threading.RLock())
        self._clearer = threading.Thread(target=self._clear_for_ever, name="kvrelay-pool-clear", daemon=True)
        self._clearer.start()

    def close(self) -> None:
        """Give the memory back; whoever reads the pool finds every block stale. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._clearer.join()
        self.arena.close()

    @property
    def stats(self) -> PoolStats:
        with self._changed:
            return PoolStats(
                num_blocks=self.arena.num_blocks,
                free_blocks=self._ledger.num_free,
                num_caches=len(self._entries),
                num_leases=len(self._leases),
                num_indexed=len(self._index),
                num_evictions=self._num_evictions,
                lease_events=dict(self._lease_events),
            )

    # -- blocks for a request ---------------------------------------------------------------------------------------

    def allocate(self, num_blocks: int, *, evict: bool = True, overwritten: int = 0) -> Hold:
        """Zeroed blocks, evicting least recently used caches if need be and allowed; but the first `overwritten`
        may hold what was freed: the caller fills each whole before it makes a cache of it. `PoolFull` if that does not
        free enough, or if there are not so many: no mistake of the request's, which is answered without a cache. Then
        nothing is evicted."""
        if not 0 <= num_blocks <= self.arena.num_blocks:
            error = InvalidRequest if num_blocks < 0 else PoolFull
            raise error(f"{num_blocks} blocks asked for; this pool has {self.arena.num_blocks}")
        with self._changed:
            self._check_open()
            self._expire(self._clock())
            self._make_room(num_blocks, evict)
            blocks, dirty = self._ledger.take(num_blocks)
        as_they_are = set(blocks[:overwritten]).intersection(dirty)
        self.arena.shut(list(as_they_are))
        self.arena.clear([block for block in dirty if block not in as_they_are])
        return Hold(blocks, 0, self._drop_users)

    def match_prefix(self, token_ids: Sequence[int], salt: str) -> Hold:
        """The longest exact prefix of `token_ids` that this tenant's caches hold, in whole blocks; empty if none."""
        keys = self._keys(token_ids, salt)
        with self._changed:
            blocks = self._index.match(keys)
            self._ledger.share(blocks)
            if blocks and (owner := self._index.cache_of(blocks[-1])) in self._entries:
                self._entries.move_to_end(owner)
        return Hold(blocks, len(blocks) * self.layout.block_tokens, self._drop_users)

    def hold(self, cache_id: str, salt: str, *, require_exact: bool = False) -> Hold:
        """A cache's blocks, for as long as a request uses them. Errors as `get`."""
        with self._changed:
            entry = self.get(cache_id, salt, require_exact=require_exact)
            self._ledger.share(entry.blocks)
        return Hold(entry.blocks, entry.num_tokens, self._drop_users, entry)

    # -- caches -----------------------------------------------------------------------------------------------------

    def put(
        self,
        blocks: Sequence[int],
        token_ids: Sequence[int],
        salt: str,
        *,
        ttl_s: float,
        provenance: Provenance = EXACT,
        mapped: Span | None = None,
        is_hybrid: bool = False,
        even_barred: bool = False,
    ) -> CacheEntry:
        """Make a cache of blocks that the caller holds and has finished writing. `mapped` goes with a provenance other
        than exact, `is_hybrid` with `mapped`. The cache is a user of its own: the caller still releases its hold.
        `BundleUnusable` where the provenance is barred, unless it is made to try it out."""
        self._check_put(blocks, token_ids, provenance, mapped)
        digest = token_digest(token_ids, salt)
        keys = self._keys(token_ids, salt) if provenance == EXACT else []
        now = self._clock()
        entry = CacheEntry(
            cache_id=new_cache_id(),
            token_ids=tuple(token_ids),
            blocks=tuple(blocks),
            digest=digest,
            tenant_salt=salt,
            created_at=now,
            expires_at=now + ttl_s,
            provenance=provenance,
            mapped=mapped,
            is_hybrid=is_hybrid,
            keys=tuple(keys),
        )
        with self._changed:
            if provenance in self._barred and not even_barred:
                raise BundleUnusable(f"what is {provenance} is not kept: that bundle is off")
            self._ledger.share(entry.blocks)
            self._entries[entry.cache_id] = entry
            self._index.add(entry.keys, entry.blocks, entry.cache_id)
            self._next_expiry = min(self._next_expiry, entry.expires_at)
        return entry

    def store(
        self,
        token_ids: Sequence[int],
        kv: KVCache,
        salt: str,
        *,
        ttl_s: float,
        prefix: Hold | None = None,
        evict: bool = True,
    ) -> CacheEntry:
        """A new cache of all `token_ids`: the first `kv.start` tokens from `prefix`, the others from `kv`.

        Whole blocks of `prefix` are shared, one that is cut is copied. On top of a cache that is not exact the result
        has that cache's provenance, whatever was computed since. Errors as `allocate` and `put`.
        """
        base = prefix.entry if prefix is not None else None
        size = self.layout.block_tokens
        shared, cut = divmod(kv.start, size)
        self._check_store(token_ids, kv, salt, prefix)
        needed, whole = blocks_for(len(token_ids), size) - shared, len(token_ids) // size - shared
        with self.allocate(needed, evict=evict, overwritten=whole) as fresh:
            blocks = (prefix.blocks[:shared] if prefix else ()) + fresh.blocks
            if prefix is not None and cut:
                self.scatter(blocks, self.gather(prefix.blocks, shared * size, kv.start))
            self.scatter(blocks, kv)
            return self.put(
                blocks,
                token_ids,
                salt,
                ttl_s=ttl_s,
                provenance=base.provenance if base else EXACT,
                mapped=_mapped_below(base.mapped, kv.start) if base and base.mapped else None,
                is_hybrid=base is not None and base.is_hybrid,
            )

    def get(self, cache_id: str, salt: str, *, require_exact: bool = False) -> CacheEntry:
        """The cache, now the most recently used. `CacheNotFound`: never here, expired or evicted. `CacheMismatch`:
        another tenant's, or not exact where that is required."""
        with self._changed:
            entry = self.peek(cache_id)
            _check_use(entry, salt, require_exact)
            self._entries.move_to_end(entry.cache_id)
            return entry

    def peek(self, cache_id: str) -> CacheEntry:
        """The cache, whoever's it is, to look at and not to use. `CacheNotFound` as in `get`."""
        with self._changed:
            self._expire(self._clock())
            cache_id = self._successors.get(cache_id, cache_id)
            if cache_id not in self._entries:
                raise CacheNotFound(f"no cache {cache_id} in epoch {self.epoch}", param="cache_id")
            return self._entries[cache_id]

    def stands(self, entry: CacheEntry) -> bool:
        """Whether this very cache is still here: neither dropped, evicted, expired, nor superseded."""
        with self._changed:
            self._expire(self._clock())
            return entry.cache_id in self._entries

    def drop(self, cache_id: str, salt: str) -> None:
        """Forget a cache. Its blocks come free when nobody else uses them."""
        with self._changed:
            self._forget(self.get(cache_id, salt))

    def discard(self, cache_id: str) -> None:
        """Forget a cache, whoever's it is. `CacheNotFound` as in `get`."""
        with self._changed:
            self._forget(self.peek(cache_id))

    def discard_itself(self, cache_id: str) -> None:
        """As `discard`, but none that has taken its place; no error where it has gone."""
        with self._changed:
            if cache_id in self._entries:
                self._forget(self._entries[cache_id])

    def bar(self, provenance: Provenance) -> None:
        """Forget all caches of this provenance, whoever's they are, and take no more, not even one that is being
        written by now on top of such a one; until `unbar`."""
        with self._changed:
            if provenance not in self._barred:
                self._barred.add(provenance)
                self._forget_made_by(provenance)

    def unbar(self, provenance: Provenance) -> None:
        with self._changed:
            self._barred.discard(provenance)

    def evicted(self, token_ids: Sequence[int], salt: str, cache_id: str | None = None) -> str | None:
        """Which of this tenant's caches is in a second tier and serves these tokens better than what stands here: the
        one named, or else the longest exact prefix. None if there is none, as in a pool without a second tier."""
        return None

    def recall(self, cache_id: str) -> Generator[None, None, None]:
        """Bring an evicted cache back, a few blocks at a time: to be gone through off the event loop. Closed before its
        end, it leaves everything as it was. What cannot come back does not."""
        yield from ()

    def mapped(self) -> list[CacheEntry]:
        """The caches that are not exact, least recently used first."""
        with self._changed:
            return [entry for entry in self._entries.values() if not entry.is_exact]

    def supersede(self, exact: CacheEntry, *, tip: CacheEntry | None = None) -> int:
        """Have `exact` take the place, in one go, of every mapped cache of its tenant whose tokens are the beginning of
        its own; how many there were. Whoever names one of them gets `exact`, as long as that stands. Blocks that a
        request or a lease still uses stay until it ends. Given the `tip` of which `exact` was made, it takes no place
        once that is gone."""
        with self._changed:
            if not exact.is_exact or exact.cache_id not in self._entries:
                return 0
            if tip is not None and not self.stands(tip):
                return 0
            chain = [entry for entry in self.mapped() if is_prefix(entry, exact)]
            for entry in chain:
                self._forget(entry)
                self._successors[entry.cache_id] = exact.cache_id
            return len(chain)

    # -- leases -----------------------------------------------------------------------------------------------------

    def lease(self, cache_id: str, salt: str, *, ttl_s: float) -> Lease:
        """Pin a cache for another worker's reading. Errors as `get`; `Overloaded` when too many leases are out."""
        with self._changed:
            entry = self.get(cache_id, salt)
            if len(self._leases) >= self._max_leases:
                self._lease_events["refused"] += 1
                raise Overloaded(f"{self._max_leases} leases are out, which is the most", retry_after_s=1.0)
            self._ledger.share(entry.blocks)
            generations = tuple(self.arena.generations_of(entry.blocks))
            lease = Lease(f"lease-{secrets.token_hex(16)}", entry, generations, self._clock() + ttl_s)
            self._leases[lease.lease_id] = lease
            self._lease_events["granted"] += 1
            self._next_expiry = min(self._next_expiry, lease.expires_at)
            return lease

    def release(self, cache_id: str, lease_id: str) -> None:
        """End a lease. One that has ended already, by expiry say, is no error."""
        with self._changed:
            lease = self._leases.get(lease_id)
            if lease is not None and lease.entry.cache_id == cache_id:
                self._end_lease(lease, "released")

    def num_leases(self, cache_id: str) -> int:
        with self._changed:
            return sum(lease.entry.cache_id == cache_id for lease in self._leases.values())

    def sweep(self, now: float | None = None) -> None:
        """End what has expired by `now`. To be called every second or so; `allocate` and `get` do it too."""
        with self._changed:
            self._expire(self._clock() if now is None else now)

    def _keys(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Of an exact cache's full blocks. Hashing takes long: to be called without the lock."""
        return block_chain(token_ids, KVIdentity(salt, self.fingerprint, self.layout, EXACT))

    # -- inside, with the lock held ---------------------------------------------------------------------------------

    def _make_room(self, num_blocks: int, evict: bool) -> None:
        while self._ledger.num_ready < num_blocks:
            if self._ledger.num_clearing and self._changed.wait(_CLEAR_TIMEOUT_S):
                continue
            needed = num_blocks - self._ledger.num_ready
            victims = choose_victims(self._entries.values(), self._ledger.users, needed) if evict else None
            if victims is None:
                raise self._full(num_blocks, evict)
            for entry in victims:
                self._forget(entry)
            self._num_evictions += len(victims)

    def _full(self, num_blocks: int, evict: bool) -> PoolFull:
        now = self._clock()
        waits = [lease.expires_at - now for lease in self._leases.values()]
        return PoolFull(
            f"{num_blocks} blocks asked for; {self._ledger.num_free} of {self.arena.num_blocks} are free and the "
            f"others are in use by requests and {len(self._leases)} leases{'' if evict else ', or by caches'}",
            retry_after_s=min(max(min(waits, default=1.0), 0.1), 5.0),
        )

    def _expire(self, now: float) -> None:
        if now < self._next_expiry:
            return
        for lease in [lease for lease in self._leases.values() if lease.expires_at <= now]:
            self._end_lease(lease, "expired")
        for entry in [entry for entry in self._entries.values() if entry.expires_at <= now]:
            self._forget(entry)
        ends = [lease.expires_at for lease in self._leases.values()]
        ends += [entry.expires_at for entry in self._entries.values()]
        self._next_expiry = min(ends, default=math.inf)

    def _end_lease(self, lease: Lease, how: str) -> None:
        self._lease_events[how] += 1
        del self._leases[lease.lease_id]
        self._drop_users(lease.entry.blocks)

    def _forget(self, entry: CacheEntry) -> None:
        del self._entries[entry.cache_id]
        if entry.is_exact and self._successors:
            self._successors = {old: new for old, new in self._successors.items() if new != entry.cache_id}
        self._drop_users(entry.blocks)

    def _forget_made_by(self, provenance: Provenance) -> None:
        for entry in [entry for entry in self._entries.values() if entry.provenance == provenance]:
            self._forget(entry)

    def _drop_users(self, blocks: Sequence[int]) -> None:
        with self._changed:
            freed = self._ledger.drop(blocks)
            self._index.forget(freed)
            if not self._closed:
                self.arena.open(freed)
            self._changed.notify_all()

    # -- clearing ---------------------------------------------------------------------------------------------------

    def _clear_for_ever(self) -> None:
        while batch := self._next_batch():
            self.arena.clear(batch)
            with self._changed:
                self._ledger.cleaned(batch)
                self._changed.notify_all()

    def _next_batch(self) -> list[int]:
        """Blocks to clear, as soon as there are any; none when the pool closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ledger.has_dirty)
            return [] if self._closed else self._ledger.next_dirty(CLEAR_BATCH)

    # -- checks -----------------------------------------------------------------------------------------------------

    def _check_put(
        self, blocks: Sequence[int], token_ids: Sequence[int], provenance: Provenance, mapped: Span | None
    ) -> None:
        check_blocks(blocks, self.arena.num_blocks, InvalidRequest)
        needed = blocks_for(len(token_ids), self.layout.block_tokens)
        if not token_ids or len(blocks) != needed:
            raise InvalidRequest(f"{len(token_ids)} tokens fill {needed} blocks, at least one; got {len(blocks)}")
        if (provenance == EXACT) != (mapped is None):
            raise InvalidRequest(f"provenance {provenance!r} does not go with mapped tokens {mapped}")
        if mapped is not None and not 0 <= mapped.begin <= mapped.end <= len(token_ids):
            raise InvalidRequest(f"mapped tokens {mapped} do not lie in {len(token_ids)} tokens")

    def _check_store(self, token_ids: Sequence[int], kv: KVCache, salt: str, prefix: Hold | None) -> None:
        if kv.start + kv.num_tokens != len(token_ids):
            raise InvalidRequest(f"{len(token_ids)} tokens, but the KV ends at {kv.start + kv.num_tokens}")
        if kv.start > (prefix.num_tokens if prefix else 0):
            raise InvalidRequest(
                f"the KV starts at {kv.start}, past the {prefix.num_tokens if prefix else 0} tokens of its prefix"
            )
        entry = prefix.entry if prefix else None
        if entry is None:
            return
        _check_use(entry, salt, require_exact=False)
        if entry.common_prefix(token_ids) < kv.start:
            raise CacheMismatch(f"the first {kv.start} tokens are not those of {entry.cache_id}", param="token_ids")


def _check_use(entry: CacheEntry, salt: str, require_exact: bool) -> None:
    if not secrets.compare_digest(entry.tenant_salt, salt):
        raise CacheMismatch(f"{entry.cache_id} belongs to another tenant", param="tenant_salt")
    if require_exact and not entry.is_exact:
        raise CacheMismatch(f"{entry.cache_id} is {entry.provenance}; an exact cache is required", param="cache_id")


def is_prefix(entry: CacheEntry, whole: CacheEntry) -> bool:
    same_tenant = secrets.compare_digest(entry.tenant_salt, whole.tenant_salt)
    return same_tenant and entry.common_prefix(whole.token_ids) == entry.num_tokens


def _mapped_below(mapped: Span, start: int) -> Span:
    """What is left of a base's mapped tokens when everything from `start` on is replaced. A span even if none are left:
    what was once read from a mapped cache is not taken for exact."""
    begin = min(mapped.begin, start)
    return Span(begin, max(begin, min(mapped.end, start)))
