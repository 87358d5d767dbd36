"""Caches that may not serve: another tenant's, one that never was, one for which there is no mapper."""

from __future__ import annotations

import hashlib

import pytest

from tests.e2e import contract
from tests.e2e.conftest import Right
from tests.e2e.running import Client, Cluster
from tests.e2e.talks import talk
from workers.api.client import WorkerClient
from workers.api.errors import BundleUnusable, CacheMismatch, CacheNotFound, Unauthorized
from workers.api.schemas import LeaseRequest

OTHER_SALT = "0d" * 16
KEYS = {"north": "key-of-the-north", "south": "key-of-the-south"}


async def test_a_cache_of_another_tenant(cluster: Cluster) -> None:
    asked = talk("Cordelia")
    read = await contract.prefilled(cluster, asked)
    async with cluster.worker("small") as small:
        with pytest.raises(CacheMismatch, match=read.cache_id):
            await small.chat(contract.chat(asked, read.cache_id, salt=OTHER_SALT), timeout_s=contract.TIMEOUT_S)
        with pytest.raises(CacheMismatch, match=read.cache_id):
            await small.lease(read.cache_id, LeaseRequest(ttl_s=5, tenant_salt=OTHER_SALT), timeout_s=5)
    with pytest.raises(CacheMismatch, match=read.cache_id):
        await contract.transferred(cluster, read, salt=OTHER_SALT)
    moved = await contract.transferred(cluster, read)
    async with cluster.worker("large") as large:
        with pytest.raises(CacheMismatch, match=moved.cache_id):
            await large.chat(contract.chat(asked, moved.cache_id, salt=OTHER_SALT), timeout_s=contract.TIMEOUT_S)
    again = await contract.prefilled(cluster, asked, salt=OTHER_SALT)
    assert again.cached_tokens == 0
    assert again.digest != read.digest


async def test_a_cache_that_never_was(cluster: Cluster) -> None:
    read = await contract.prefilled(cluster, talk("Regan"))
    never = read.model_copy(update={"cache_id": f"kvc-{'0' * 32}"})
    with pytest.raises(CacheNotFound, match=never.cache_id):
        await contract.transferred(cluster, never)
    async with cluster.worker("large") as large:
        with pytest.raises(CacheNotFound, match=read.cache_id):  # the small worker's id means nothing to the large one
            await large.chat(contract.chat(talk("Regan"), read.cache_id), timeout_s=contract.TIMEOUT_S)


async def test_a_bundle_for_other_weights(cluster: Cluster) -> None:
    async with cluster.worker("misfit") as worker:
        (bundle,) = (await worker.info()).bundles
    assert not bundle.usable
    assert bundle.reason and "weights" in bundle.reason
    with pytest.raises(BundleUnusable, match="none"):
        await contract.transferred(cluster, await contract.prefilled(cluster, talk("Goneril")), tier="misfit")


async def test_who_does_not_know_the_cluster_secret(cluster: Cluster) -> None:
    async with WorkerClient(cluster.child("small").url, "not the cluster's secret") as stranger:
        with pytest.raises(Unauthorized):
            await stranger.info()
        with pytest.raises(Unauthorized):
            await stranger.chat(contract.chat(talk("Kent")), timeout_s=5)


def test_tenants_share_nothing(cluster: Cluster, right: Right) -> None:
    """Two tenants with the same words: neither finds what the other has left, whatever salt it sends."""
    asked = talk("Gloucester")
    tenants = {name: {"api_keys": [hashlib.sha256(key.encode()).hexdigest()]} for name, key in KEYS.items()}
    with cluster.gateway("tenants", tenants=tenants | {"default": {}}) as nobody:
        assert nobody.ask(asked).status == 401
        north, south = (Client(nobody.url, key) for key in KEYS.values())
        with north, south:
            for model in ("small", "large"):
                assert north.ask(asked, model).path == "prefill"
                assert north.ask(asked, model).path == "exact"
                reply = south.ask(asked, model)
                assert (reply.path, reply.told["cached_tokens"]) == ("prefill", 0)
                right(reply, asked)
            mapped = talk("Albany")
            assert north.escalate(mapped).path == "mapped"
            reply = south.escalate(mapped)
            assert (reply.path, reply.told["cached_tokens"]) == ("mapped", 0)
            right(reply, mapped)
