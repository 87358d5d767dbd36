"""docker-compose.yml as values, for the tests and for smoke.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
COMPOSE_FILE = REPOSITORY / "docker-compose.yml"
DOCKERFILE = REPOSITORY / "deploy" / "images" / "Dockerfile"

_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


class VariableMissing(Exception):
    """A required variable is not set."""


@dataclass(frozen=True)
class Service:
    """One service with its variables filled in. `content` is its section of the file."""

    name: str
    content: Mapping[str, Any]

    @property
    def command(self) -> list[str]:
        """The command; empty for the image's own."""
        return [*self.content.get("entrypoint", []), *self.content.get("command", [])]

    @property
    def environment(self) -> dict[str, str]:
        return dict(self.content.get("environment", {}))

    @property
    def profiles(self) -> list[str]:
        return list(self.content.get("profiles", []))

    @property
    def secrets(self) -> list[str]:
        return list(self.content.get("secrets", []))

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """Pairs (source, target). A source is a folder of the project or the name of a volume."""
        return [tuple(one.split(":")[:2]) for one in self.content.get("volumes", [])]

    @property
    def depends_on(self) -> dict[str, str]:
        return {name: how["condition"] for name, how in self.content.get("depends_on", {}).items()}

    @property
    def health_test(self) -> list[str]:
        return list(self.content.get("healthcheck", {}).get("test", []))

    @property
    def names(self) -> list[str]:
        """The host names under which other services reach it."""
        networks = self.content.get("networks", [])
        aliases = [one.get("aliases", []) for one in networks.values()] if isinstance(networks, dict) else []
        return [self.name, *(alias for some in aliases for alias in some)]


@dataclass(frozen=True)
class Composed:
    """The whole file with its variables filled in."""

    content: Mapping[str, Any]

    @property
    def services(self) -> dict[str, Service]:
        return {name: Service(name, content) for name, content in self.content["services"].items()}

    def started_with(self, profile: str) -> Iterator[Service]:
        """Yield the services of a profile, dependencies first."""
        chosen = {name: one for name, one in self.services.items() if not one.profiles or profile in one.profiles}
        done: list[str] = []
        while len(done) < len(chosen):
            ready = [one for one in chosen.values() if one.name not in done and set(one.depends_on) <= set(done)]
            assert ready, f"services wait for each other: {sorted(set(chosen) - set(done))}"
            for service in ready:
                done.append(service.name)
                yield service


def load(variables: Mapping[str, str], path: Path = COMPOSE_FILE) -> Composed:
    """Raises `VariableMissing` for a required variable, or one without a default, that is not set."""
    return Composed(_filled_in(yaml.safe_load(path.read_text(encoding="utf-8")), variables))


def read_env(path: Path) -> dict[str, str]:
    """Parse the lines NAME=VALUE of an .env file."""
    lines = [line.partition("=") for line in path.read_text(encoding="utf-8").splitlines()]
    return {name: value for name, equals, value in lines if equals and not name.startswith("#")}


def image_environment() -> dict[str, str]:
    """The environment that the images set."""
    lines = re.findall(r"^ENV (\w+)=(\S+)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    return dict(lines)


def num_bytes(size: str) -> int:
    """Parse a size such as `1280m`."""
    return int(size[:-1]) * _UNITS[size[-1].lower()]


def _filled_in(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled_in(one, variables) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled_in(one, variables) for one in value]
    return _VARIABLE.sub(lambda found: _value(found, variables), value) if isinstance(value, str) else value


def _value(found: re.Match[str], variables: Mapping[str, str]) -> str:
    name, kind, rest = found["name"], found["kind"], found["rest"]
    if variables.get(name):
        return variables[name]
    if kind == "-":
        return str(rest)
    if name in variables and kind is None:
        return ""
    raise VariableMissing(f"{name} is not set: {rest or 'the file gives no default'}")
