"""One line for each time that a request touches a cache: who, which, how; never what stands in it."""

from __future__ import annotations

from typing import Literal, Protocol

import structlog

from gateway.tenants import Tenant

Access = Literal["written", "read", "transferred"]

log = structlog.get_logger()


class Who(Protocol):
    """A request, and whose it is."""

    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> Tenant: ...


def cache_access(
    who: Who, access: Access, *, worker: str, cache_id: str, num_tokens: int | None = None, source: str | None = None
) -> None:
    """`source` is the cache that a transferred one was made from."""
    told = {"num_tokens": num_tokens, "source": source}
    log.info(
        "cache_access",
        access=access,
        request_id=who.id,
        tenant=who.tenant.name,
        worker=worker,
        cache_id=cache_id,
        **{key: value for key, value in told.items() if value is not None},
    )
