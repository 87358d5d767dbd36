"""What each tenant has used of this gateway since it started, for billing."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class TenantUsage:
    requests: int = 0
    tokens_read: int = 0
    tokens_written: int = 0


class Usage:
    """In memory only: a restart begins at zero."""

    def __init__(self) -> None:
        self.since = time.time()
        self._by_tenant: defaultdict[str, TenantUsage] = defaultdict(TenantUsage)

    def add(self, tenant: str, num_read: int, num_written: int) -> None:
        """Count one request, however it ended."""
        used = self._by_tenant[tenant]
        used.requests += 1
        used.tokens_read += num_read
        used.tokens_written += num_written

    def report(self) -> dict[str, Any]:
        return {"since": self.since, "tenants": {name: asdict(used) for name, used in self._by_tenant.items()}}
