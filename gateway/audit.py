"""One line for each time that a request touches a cache: who, which, how; never what stands in it."""

from __future__ import annotations

from typing import Literal

import structlog

from gateway.state.tenants import Tenant

Access = Literal["written", "read", "transferred"]

log = structlog.get_logger()


def cache_access(
    tenant: Tenant,
    access: Access,
    *,
    worker: str,
    cache_id: str,
    num_tokens: int | None = None,
    source: str | None = None,
) -> None:
    """`source` is the cache that a transferred one was made from."""
    told = {"num_tokens": num_tokens, "source": source}
    log.info(
        "cache_access",
        access=access,
        tenant=tenant.name,
        worker=worker,
        cache_id=cache_id,
        **{key: value for key, value in told.items() if value is not None},
    )
