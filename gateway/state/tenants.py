"""Tenants: their API keys, and the salt that separates their caches."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from gateway.errors import AuthenticationFailed
from gateway.settings import DEFAULT_TENANT, Settings
from workers.api.config import SettingsError


@dataclass(frozen=True)
class Tenant:
    """`salt` is hex, derived from the cluster secret, and never leaves the cluster. Rules match `tier` as
    `tenant_tier`; `tiers` are the model tiers it may use, small to large."""

    name: str
    salt: str
    tier: str | None
    tiers: tuple[str, ...]
    requests_per_minute: int | None
    tokens_per_minute: int | None


class Tenants:
    def __init__(self, settings: Settings, secret: str):
        self._by_name = {name: _tenant(name, settings, secret) for name in settings.tenants}
        self._keys = [(key, name) for name, tenant in settings.tenants.items() for key in tenant.api_keys]

    def authenticate(self, authorization: str | None) -> Tenant:
        """Return the tenant of an `Authorization` header; the default tenant if no keys are configured.

        Raises `AuthenticationFailed`.
        """
        if not self._keys:
            return self._by_name[DEFAULT_TENANT]
        offered = key_hash(_bearer_key(authorization))
        # Compare every key, so that the time taken reveals nothing about any of them.
        found = [name for known, name in self._keys if secrets.compare_digest(known, offered)]
        if not found:
            raise AuthenticationFailed("unknown API key")
        return self._by_name[found[0]]


class AdminKey:
    """The key of `/admin`. Raises `SettingsError` if a tenant has the same key."""

    def __init__(self, key: str, settings: Settings):
        self._hash = key_hash(key)
        if any(self._hash in tenant.api_keys for tenant in settings.tenants.values()):
            raise SettingsError("admin.key_file: a tenant has the same key; the admin key must be a different one")

    def check(self, authorization: str | None) -> None:
        """Raises `AuthenticationFailed`."""
        if not secrets.compare_digest(self._hash, key_hash(_bearer_key(authorization))):
            raise AuthenticationFailed("unknown admin key")


def key_hash(key: str) -> str:
    """Return the SHA-256 of a key, in hex, as it is configured."""
    return hashlib.sha256(key.encode()).hexdigest()


def _bearer_key(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise AuthenticationFailed("missing API key; send `Authorization: Bearer KEY`")
    return key.strip()


def _tenant(name: str, settings: Settings, secret: str) -> Tenant:
    tenant = settings.tenants[name]
    tiers = [tier.name for tier in settings.tiers if not tenant.models or {tier.name, tier.model} & set(tenant.models)]
    return Tenant(
        name=name,
        salt=_salt(secret, name),
        tier=tenant.tier,
        tiers=tuple(tiers),
        requests_per_minute=tenant.requests_per_minute,
        tokens_per_minute=tenant.tokens_per_minute,
    )


def _salt(secret: str, tenant: str) -> str:
    return hmac.new(secret.encode(), f"tenant-salt:{tenant}".encode(), hashlib.sha256).hexdigest()
