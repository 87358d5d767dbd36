"""A budget that a rule may ask about: tokens of one tier within a window of time."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Budget(BaseModel):
    """So many `tokens`, read and written, of answers of `tier` in a minute, an hour or a day of the clock (UTC): of the
    request's tenant, or of everyone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tier: str
    tokens: int = Field(ge=1)
    per: Literal["minute", "hour", "day"] = "day"
    of: Literal["tenant", "everyone"] = "tenant"
