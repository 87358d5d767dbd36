"""A section of the configuration that names a Redis, and where its password stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from workers.api.addresses import scheme_of
from workers.api.redis_url import REDIS_SCHEMES, has_password, with_password


class RedisAccess(BaseModel):
    """`password_file` holds the password, under the rules of a secret, so that it stands in no URL."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    password_file: Path | None = None

    @field_validator("password_file")
    @classmethod
    def _for_a_url_without(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        url = info.data.get("url")  # none where it cannot be used
        if path is not None and url is not None and (scheme_of(url) not in REDIS_SCHEMES or has_password(url)):
            raise ValueError("goes with a redis:// or rediss:// URL that holds no password itself")
        return path

    def located(self, folder: Path) -> Self:
        """With a relative path taken from `folder`."""
        if self.password_file is None:
            return self
        return self.model_copy(update={"password_file": folder / self.password_file})

    def url_with_password(self, read: Callable[[Path], str]) -> str:
        """`read` takes the password out of its file, and raises what it likes for one that cannot be used."""
        return self.url if self.password_file is None else with_password(self.url, read(self.password_file))
