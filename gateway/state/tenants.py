"""Who asks: API keys, and the salt that keeps one tenant's caches from another's."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from gateway.errors import AuthenticationFailed, SettingsError
from gateway.settings import DEFAULT_TENANT, Settings


@dataclass(frozen=True)
class Tenant:
    """`salt` is derived from the cluster secret, in hex; it never leaves the cluster. `tier` is what rules know it by,
    `tiers` the model tiers that it may use, small to large."""

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
        """The tenant behind an `Authorization` header. Where no key is configured, everyone is the default tenant."""
        if not self._keys:
            return self._by_name[DEFAULT_TENANT]
        offered = key_hash(_offered(authorization))
        # Every key is compared, so that the time taken tells nothing of which one was close.
        found = [name for known, name in self._keys if secrets.compare_digest(known, offered)]
        if not found:
            raise AuthenticationFailed("unknown API key")
        return self._by_name[found[0]]


class AdminKey:
    """The one key of the administration. Raises `SettingsError` where a tenant has it too."""

    def __init__(self, key: str, settings: Settings):
        self._hash = key_hash(key)
        if any(self._hash in tenant.api_keys for tenant in settings.tenants.values()):
            raise SettingsError("admin.key_file: this key is a tenant's, too; the administration needs one of its own")

    def check(self, authorization: str | None) -> None:
        """Raises `AuthenticationFailed`."""
        if not secrets.compare_digest(self._hash, key_hash(_offered(authorization))):
            raise AuthenticationFailed("unknown admin key")


def key_hash(key: str) -> str:
    """A key as it is kept."""
    return hashlib.sha256(key.encode()).hexdigest()


def _offered(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise AuthenticationFailed("an API key is needed: send it as `Authorization: Bearer KEY`")
    return key.strip()


def _tenant(name: str, settings: Settings, secret: str) -> Tenant:
    its = settings.tenants[name]
    tiers = [tier.name for tier in settings.tiers if not its.models or {tier.name, tier.model} & set(its.models)]
    return Tenant(
        name=name,
        salt=_salt(secret, name),
        tier=its.tier,
        tiers=tuple(tiers),
        requests_per_minute=its.requests_per_minute,
        tokens_per_minute=its.tokens_per_minute,
    )


def _salt(secret: str, tenant: str) -> str:
    return hmac.new(secret.encode(), f"tenant-salt:{tenant}".encode(), hashlib.sha256).hexdigest()
