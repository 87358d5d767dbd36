"""Whether the gateway is ready. Calls neither a model nor the registry."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway.snapshot import Gateway
from workers.api.http.health import READY, health_router


def router(gateway: Gateway) -> APIRouter:
    def readiness() -> dict[str, Any]:
        tiers = {name: tier.is_ready for name, tier in gateway.parts.fleet.tiers.items()}
        if gateway.is_draining:
            status = "draining"
        else:
            status = READY if any(tiers.values()) else "no usable tier"
        return {"status": status, "tiers": tiers}

    return health_router(readiness, gateway.metrics.render)
