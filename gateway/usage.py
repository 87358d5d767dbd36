"""What each tenant has had from this gateway since it started, for whoever pays for it."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Used:
    requests: int = 0
    tokens_read: int = 0
    tokens_written: int = 0


class Usage:
    def __init__(self) -> None:
        self.since = time.time()
        self._by_tenant: defaultdict[str, Used] = defaultdict(Used)

    def add(self, tenant: str, num_read: int, num_written: int) -> None:
        """One request's, however it ended."""
        used = self._by_tenant[tenant]
        used.requests += 1
        used.tokens_read += num_read
        used.tokens_written += num_written

    def told(self) -> dict[str, Any]:
        return {"since": self.since, "tenants": {name: asdict(used) for name, used in self._by_tenant.items()}}
