"""Mapping methods by name. A method's module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mappers.errors import UnknownMethod
from mappers.methods.base import Method, Solution

__all__ = ["METHODS", "Method", "Solution", "get"]

METHODS = {
    "identity": "mappers.methods.identity:Identity",
    "ridge": "mappers.methods.ridge:Ridge",
}


def get(name: str, **options: Any) -> Method:
    """The method `name`, built with its options. Raises `UnknownMethod`."""
    if name not in METHODS:
        raise UnknownMethod(f"unknown mapper {name!r}; known: {', '.join(sorted(METHODS))}")
    module, _, cls = METHODS[name].partition(":")
    method: Method = getattr(import_module(module), cls)(**options)
    return method
