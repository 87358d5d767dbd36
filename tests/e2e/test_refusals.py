"""Caches that must not be used: another tenant's, an unknown one, one without a mapper."""

from __future__ import annotations

import hashlib

import pytest

from tests.e2e import contract
from tests.e2e.conftest import AssertRight
from tests.e2e.contract import TIMEOUT_S
from tests.e2e.conversations import conversation
from tests.e2e.running import Client, Cluster
from workers.api.client import WorkerClient
from workers.api.errors import BundleUnusable, CacheMismatch, CacheNotFound, Unauthorized
from workers.api.schemas import LeaseRequest

OTHER_SALT = "0d" * 16
KEYS = {"north": "key-of-the-north", "south": "key-of-the-south"}


async def test_cache_of_another_tenant_is_refused(cluster: Cluster) -> None:
    messages = conversation("Cordelia")
    prefilled = await contract.prefill(cluster, messages)
    async with cluster.worker("small") as small:
        with pytest.raises(CacheMismatch, match=prefilled.cache_id):
            await small.chat(contract.chat_request(messages, prefilled.cache_id, salt=OTHER_SALT), timeout_s=TIMEOUT_S)
        with pytest.raises(CacheMismatch, match=prefilled.cache_id):
            await small.lease(prefilled.cache_id, LeaseRequest(ttl_s=5, tenant_salt=OTHER_SALT), timeout_s=5)
    with pytest.raises(CacheMismatch, match=prefilled.cache_id):
        await contract.transfer(cluster, prefilled, salt=OTHER_SALT)
    transferred = await contract.transfer(cluster, prefilled)
    async with cluster.worker("large") as large:
        with pytest.raises(CacheMismatch, match=transferred.cache_id):
            await large.chat(
                contract.chat_request(messages, transferred.cache_id, salt=OTHER_SALT), timeout_s=TIMEOUT_S
            )
    again = await contract.prefill(cluster, messages, salt=OTHER_SALT)
    assert again.cached_tokens == 0
    assert again.digest != prefilled.digest


async def test_unknown_cache_is_refused(cluster: Cluster) -> None:
    prefilled = await contract.prefill(cluster, conversation("Regan"))
    unknown = prefilled.model_copy(update={"cache_id": f"kvc-{'0' * 32}"})
    with pytest.raises(CacheNotFound, match=unknown.cache_id):
        await contract.transfer(cluster, unknown)
    async with cluster.worker("large") as large:
        with pytest.raises(CacheNotFound, match=prefilled.cache_id):  # an id is valid on its own worker only
            await large.chat(contract.chat_request(conversation("Regan"), prefilled.cache_id), timeout_s=TIMEOUT_S)


async def test_bundle_for_other_weights_is_refused(cluster: Cluster) -> None:
    async with cluster.worker("misfit") as worker:
        (bundle,) = (await worker.info()).bundles
    assert not bundle.usable
    assert bundle.reason and "weights" in bundle.reason
    with pytest.raises(BundleUnusable, match="none"):
        await contract.transfer(cluster, await contract.prefill(cluster, conversation("Goneril")), tier="misfit")


async def test_wrong_cluster_secret_is_refused(cluster: Cluster) -> None:
    async with WorkerClient(cluster.child("small").url, "not the cluster's secret") as stranger:
        with pytest.raises(Unauthorized):
            await stranger.info()
        with pytest.raises(Unauthorized):
            await stranger.chat(contract.chat_request(conversation("Kent")), timeout_s=5)


def test_tenants_share_no_caches(cluster: Cluster, assert_right: AssertRight) -> None:
    """Two tenants ask the same: neither finds the other's cache."""
    messages = conversation("Gloucester")
    tenants = {name: {"api_keys": [hashlib.sha256(key.encode()).hexdigest()]} for name, key in KEYS.items()}
    with cluster.gateway("tenants", tenants=tenants | {"default": {}}) as keyless:
        assert keyless.ask(messages).status == 401
        north, south = (Client(keyless.url, key) for key in KEYS.values())
        with north, south:
            for model in ("small", "large"):
                assert north.ask(messages, model).path == "prefill"
                assert north.ask(messages, model).path == "exact"
                reply = south.ask(messages, model)
                assert (reply.path, reply.report["cached_tokens"]) == ("prefill", 0)
                assert_right(reply, messages)
            mapped = conversation("Albany")
            assert north.escalate(mapped).path == "mapped"
            reply = south.escalate(mapped)
            assert (reply.path, reply.report["cached_tokens"]) == ("mapped", 0)
            assert_right(reply, mapped)
