"""`Pool`: the one owner of a worker's blocks and of the caches in them.

    pool = Pool(create_arena("shm", layout, budget_bytes, worker="small-0", epoch=new_epoch()), model.fingerprint)
    with pool.match_prefix(ids, salt) as prefix, pool.allocate(3) as fresh:      # blocks that this request uses
        pool.scatter(fresh.blocks, kv)                                           # written once
        entry = pool.put(prefix.blocks + fresh.blocks, ids, salt, ttl_s=300)     # a cache, found by id or by prefix
    lease = pool.lease(entry.cache_id, salt, ttl_s=10)                           # another worker reads it

Each cache, hold and lease is a user of its blocks. When a block loses its last user, its generation turns odd at once,
so that no late reader takes the old content for valid, and a thread zeroes it.

Safe from any thread. One lock guards the tables and is held for table work only. Copies (`PoolMemory`) and clearing run
without it, on blocks with no other writer; run copies off the event loop. Tenants, tokens and provenance are checked
here.
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
CLEAR_TIMEOUT_S = 5.0
CLEAR_BATCH = 4  # blocks zeroed at a time: few enough that a caller hardly waits for them


class Pool(PoolMemory):
    """Blocks of one model, whose weights have `fingerprint`."""

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
        self._successors: dict[str, str] = {}  # ids of superseded mapped caches, to the exact ones
        self._barred: set[Provenance] = set()
        self._next_expiry = math.inf  # no cache or lease expires earlier
        self._num_evictions = 0
        self._lease_events = dict.fromkeys(LEASE_EVENTS, 0)
        self._changed = threading.Condition(threading.RLock())
        self._clearer = threading.Thread(target=self._clear_freed_blocks, name="kvrelay-pool-clear", daemon=True)
        self._clearer.start()

    def close(self) -> None:
        """Free the memory; readers find every block stale. Idempotent."""
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

    def allocate(self, num_blocks: int, *, evict: bool = True, num_overwritten: int = 0) -> Hold:
        """Take zeroed blocks, evicting least recently used caches if necessary and allowed.

        The first `num_overwritten` may hold old content: the caller fills each of them completely before it makes a
        cache of it. Raises `PoolFull`, and evicts nothing, if eviction cannot free enough or the pool is too small. The
        request is valid all the same, and is answered without a cache.
        """
        if not 0 <= num_blocks <= self.arena.num_blocks:
            error = InvalidRequest if num_blocks < 0 else PoolFull
            raise error(f"{num_blocks} blocks requested; this pool has {self.arena.num_blocks}")
        with self._changed:
            self._check_open()
            self._expire(self._clock())
            self._make_room(num_blocks, evict)
            blocks, dirty = self._ledger.take(num_blocks)
        uncleared = set(blocks[:num_overwritten]).intersection(dirty)
        self.arena.shut(list(uncleared))
        self.arena.clear([block for block in dirty if block not in uncleared])
        return Hold(blocks, 0, self._drop_users)

    def match_prefix(self, token_ids: Sequence[int], salt: str) -> Hold:
        """Hold the longest exact prefix of `token_ids` in this tenant's caches, in whole blocks; empty if none."""
        keys = self._keys(token_ids, salt)
        with self._changed:
            blocks = self._index.match(keys)
            self._ledger.share(blocks)
            if blocks and (owner := self._index.cache_of(blocks[-1])) in self._entries:
                self._entries.move_to_end(owner)
        return Hold(blocks, len(blocks) * self.layout.block_tokens, self._drop_users)

    def hold(self, cache_id: str, salt: str, *, require_exact: bool = False) -> Hold:
        """Hold a cache's blocks while a request uses them. Raises what `get` raises."""
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
        allow_barred: bool = False,
    ) -> CacheEntry:
        """Make a cache of blocks that the caller holds and has finished writing.

        `mapped` is given unless the provenance is exact, `is_hybrid` only with `mapped`. The cache is a user of its
        own: the caller still releases its hold. Raises `BundleUnusable` if the provenance is barred and not allowed.
        """
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
            if provenance in self._barred and not allow_barred:
                raise BundleUnusable(f"a cache of provenance {provenance} cannot be stored: the bundle is off")
            self._ledger.share(entry.blocks)
            self._add(entry)
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
        """Store a cache of all `token_ids`: the first `kv.start` tokens from `prefix`, the others from `kv`.

        Whole blocks of `prefix` are shared; a cut one is copied. On top of a mapped cache the result has that cache's
        provenance, whatever was computed since. Raises what `allocate` and `put` raise.
        """
        base = prefix.entry if prefix is not None else None
        size = self.layout.block_tokens
        num_shared, cut = divmod(kv.start, size)
        self._check_store(token_ids, kv, salt, prefix)
        needed, num_whole = blocks_for(len(token_ids), size) - num_shared, len(token_ids) // size - num_shared
        with self.allocate(needed, evict=evict, num_overwritten=num_whole) as fresh:
            blocks = (prefix.blocks[:num_shared] if prefix else ()) + fresh.blocks
            if prefix is not None and cut:
                self.scatter(blocks, self.gather(prefix.blocks, num_shared * size, kv.start))
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
        """Return the cache and mark it as used. Raises `CacheNotFound` if it never existed, has expired or was evicted,
        `CacheMismatch` if it is another tenant's, or is not exact but has to be."""
        with self._changed:
            entry = self.peek(cache_id)
            _check_use(entry, salt, require_exact)
            self._entries.move_to_end(entry.cache_id)
            return entry

    def peek(self, cache_id: str) -> CacheEntry:
        """Return any tenant's cache, for inspection only. Raises `CacheNotFound` as `get` does."""
        with self._changed:
            self._expire(self._clock())
            cache_id = self._successors.get(cache_id, cache_id)
            if cache_id not in self._entries:
                raise CacheNotFound(f"no cache {cache_id} in epoch {self.epoch}", param="cache_id")
            return self._entries[cache_id]

    def contains(self, entry: CacheEntry) -> bool:
        """Return whether this very cache still exists: not dropped, evicted, expired or superseded."""
        with self._changed:
            self._expire(self._clock())
            return entry.cache_id in self._entries

    def drop(self, cache_id: str, salt: str) -> None:
        """Remove a tenant's cache. Blocks without other users are freed. Raises what `get` raises."""
        with self._changed:
            self._forget(self.get(cache_id, salt))

    def discard(self, cache_id: str) -> None:
        """Remove any tenant's cache. Raises `CacheNotFound` as `get` does."""
        with self._changed:
            self._forget(self.peek(cache_id))

    def discard_if_present(self, cache_id: str) -> None:
        """Remove this very cache, not one that has superseded it. No error if it is gone."""
        with self._changed:
            if cache_id in self._entries:
                self._forget(self._entries[cache_id])

    def bar(self, provenance: Provenance) -> None:
        """Remove all caches of this provenance, of any tenant, and accept no more until `unbar`: not even one that is
        being computed on top of such a cache now."""
        with self._changed:
            if provenance not in self._barred:
                self._barred.add(provenance)
                self._forget_provenance(provenance)

    def unbar(self, provenance: Provenance) -> None:
        with self._changed:
            self._barred.discard(provenance)

    def find_evicted(self, token_ids: Sequence[int], salt: str, cache_id: str | None = None) -> str | None:
        """Return the tenant's cache in a second tier that serves these tokens better than the caches here: the named
        one, or else the longest exact prefix. None if there is none, as in a pool without a second tier."""
        return None

    def recall(self, cache_id: str) -> Generator[None, None, None]:
        """Bring back an evicted cache, a few blocks a step; to be iterated off the event loop.

        Closing it early changes nothing. A cache that cannot come back is skipped without an error.
        """
        yield from ()

    def mapped_caches(self) -> list[CacheEntry]:
        """Return the caches that are not exact, least recently used first."""
        with self._changed:
            return [entry for entry in self._entries.values() if not entry.is_exact]

    def supersede(self, exact: CacheEntry, *, tip: CacheEntry | None = None) -> int:
        """Atomically replace by `exact` every mapped cache of its tenant whose tokens are a prefix of its own. Returns
        how many there were.

        The ids of the replaced caches then name `exact`, as long as it exists. Blocks that a request or a lease still
        uses are kept until it ends. Replaces nothing if the `tip`, from which `exact` was made, is gone.
        """
        with self._changed:
            if not exact.is_exact or exact.cache_id not in self._entries:
                return 0
            if tip is not None and not self.contains(tip):
                return 0
            replaced = [entry for entry in self.mapped_caches() if is_prefix(entry, exact)]
            for entry in replaced:
                self._forget(entry)
                self._successors[entry.cache_id] = exact.cache_id
            return len(replaced)

    # -- leases -----------------------------------------------------------------------------------------------------

    def lease(self, cache_id: str, salt: str, *, ttl_s: float) -> Lease:
        """Pin a cache for another worker to read. Raises what `get` raises, and `Overloaded` above `max_leases`."""
        with self._changed:
            entry = self.get(cache_id, salt)
            if len(self._leases) >= self._max_leases:
                self._lease_events["refused"] += 1
                raise Overloaded(f"too many leases; the limit is {self._max_leases}", retry_after_s=1.0)
            self._ledger.share(entry.blocks)
            generations = tuple(self.arena.generations_of(entry.blocks))
            lease = Lease(f"lease-{secrets.token_hex(16)}", entry, generations, self._clock() + ttl_s)
            self._leases[lease.lease_id] = lease
            self._lease_events["granted"] += 1
            self._next_expiry = min(self._next_expiry, lease.expires_at)
            return lease

    def release(self, cache_id: str, lease_id: str) -> None:
        """End a lease. It is no error if it has already ended."""
        with self._changed:
            lease = self._leases.get(lease_id)
            if lease is not None and lease.entry.cache_id == cache_id:
                self._end_lease(lease, "released")

    def num_leases(self, cache_id: str) -> int:
        with self._changed:
            return sum(lease.entry.cache_id == cache_id for lease in self._leases.values())

    def sweep(self, now: float | None = None) -> None:
        """Remove what has expired. Call it about every second; `allocate` and `get` do it too."""
        with self._changed:
            self._expire(self._clock() if now is None else now)

    def _keys(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Compute the keys of an exact cache's full blocks. Call it without the lock: hashing is slow."""
        return block_chain(token_ids, KVIdentity(salt, self.fingerprint, self.layout, EXACT))

    # -- with the lock held -----------------------------------------------------------------------------------------

    def _make_room(self, num_blocks: int, evict: bool) -> None:
        while self._ledger.num_ready < num_blocks:
            if self._ledger.num_clearing and self._changed.wait(CLEAR_TIMEOUT_S):
                continue
            needed = num_blocks - self._ledger.num_ready
            victims = choose_victims(self._entries.values(), self._ledger.users, needed) if evict else None
            if victims is None:
                expiries = [lease.expires_at - self._clock() for lease in self._leases.values()]
                raise PoolFull(
                    f"{num_blocks} blocks requested; {self._ledger.num_free} of {self.arena.num_blocks} are free, the "
                    f"others are used by requests, {len(self._leases)} leases{'' if evict else ' and caches'}",
                    retry_after_s=min(max(min(expiries, default=1.0), 0.1), 5.0),
                )
            for entry in victims:
                self._forget(entry)
            self._num_evictions += len(victims)

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

    def _end_lease(self, lease: Lease, event: str) -> None:
        self._lease_events[event] += 1
        del self._leases[lease.lease_id]
        self._drop_users(lease.entry.blocks)

    def _add(self, entry: CacheEntry) -> None:
        """List a cache that is already a user of its blocks."""
        self._entries[entry.cache_id] = entry
        self._index.add(entry.keys, entry.blocks, entry.cache_id)
        self._next_expiry = min(self._next_expiry, entry.expires_at)

    def _forget(self, entry: CacheEntry) -> None:
        del self._entries[entry.cache_id]
        if entry.is_exact and self._successors:
            self._successors = {old: new for old, new in self._successors.items() if new != entry.cache_id}
        self._drop_users(entry.blocks)

    def _forget_provenance(self, provenance: Provenance) -> None:
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

    def _clear_freed_blocks(self) -> None:
        """Clear blocks as they become free, until the pool closes."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._ledger.has_dirty)
                if self._closed:
                    return
                batch = self._ledger.next_dirty(CLEAR_BATCH)
            self.arena.clear(batch)
            with self._changed:
                self._ledger.cleaned(batch)
                self._changed.notify_all()

    # -- checks -----------------------------------------------------------------------------------------------------

    def _check_put(
        self, blocks: Sequence[int], token_ids: Sequence[int], provenance: Provenance, mapped: Span | None
    ) -> None:
        check_blocks(blocks, self.arena.num_blocks, InvalidRequest)
        needed = blocks_for(len(token_ids), self.layout.block_tokens)
        if not token_ids or len(blocks) != needed:
            raise InvalidRequest(f"{len(token_ids)} tokens need {needed} blocks, and at least one; got {len(blocks)}")
        if (provenance == EXACT) != (mapped is None):
            raise InvalidRequest(f"provenance {provenance!r} does not allow mapped tokens {mapped}")
        if mapped is not None and not 0 <= mapped.begin <= mapped.end <= len(token_ids):
            raise InvalidRequest(f"mapped tokens {mapped} are outside of {len(token_ids)} tokens")

    def _check_store(self, token_ids: Sequence[int], kv: KVCache, salt: str, prefix: Hold | None) -> None:
        if kv.start + kv.num_tokens != len(token_ids):
            raise InvalidRequest(f"{len(token_ids)} tokens, but the KV ends at {kv.start + kv.num_tokens}")
        num_prefix = prefix.num_tokens if prefix else 0
        if kv.start > num_prefix:
            raise InvalidRequest(f"the KV starts at {kv.start}, past the {num_prefix} tokens of its prefix")
        if prefix is None or prefix.entry is None:
            return
        _check_use(prefix.entry, salt, require_exact=False)
        if prefix.entry.common_prefix(token_ids) < kv.start:
            raise CacheMismatch(
                f"the first {kv.start} tokens differ from those of {prefix.entry.cache_id}", param="token_ids"
            )


def _check_use(entry: CacheEntry, salt: str, require_exact: bool) -> None:
    if not secrets.compare_digest(entry.tenant_salt, salt):
        raise CacheMismatch(f"{entry.cache_id} belongs to another tenant", param="tenant_salt")
    if require_exact and not entry.is_exact:
        raise CacheMismatch(f"{entry.cache_id} is {entry.provenance}; an exact cache is required", param="cache_id")


def is_prefix(entry: CacheEntry, whole: CacheEntry) -> bool:
    same_tenant = secrets.compare_digest(entry.tenant_salt, whole.tenant_salt)
    return same_tenant and entry.common_prefix(whole.token_ids) == entry.num_tokens


def _mapped_below(mapped: Span, start: int) -> Span:
    """Return what is left of a base's mapped tokens if everything from `start` on is replaced. The span may be empty:
    what was once computed over a mapped cache is not exact."""
    begin = min(mapped.begin, start)
    return Span(begin, max(begin, min(mapped.end, start)))
