"""Durations of the configuration: a wait that never ends is none."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrNone = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # 0: no time at all
