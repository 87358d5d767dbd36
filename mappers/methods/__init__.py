"""Registry of mapping methods by name. A method's module is imported on first use."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any

from mappers.errors import MapperError, UnknownMethod
from mappers.methods.base import Layout, Method, Solution

__all__ = ["METHODS", "Layout", "Method", "Solution", "get"]

METHODS = {
    "hidden": "mappers.methods.hidden:Hidden",
    "identity": "mappers.methods.identity:Identity",
    "lowrank": "mappers.methods.lowrank:LowRankRidge",
    "procrustes": "mappers.methods.procrustes:Procrustes",
    "ridge": "mappers.methods.ridge:Ridge",
    "ridge-head": "mappers.methods.ridge_head:RidgeHead",
}


def get(name: str, **options: Any) -> Method:
    """Build the method `name`. Raises `UnknownMethod`, or `MapperError` for an option it does not have."""
    if name not in METHODS:
        raise UnknownMethod(f"unknown mapper {name!r}; known: {', '.join(sorted(METHODS))}")
    module, _, cls = METHODS[name].partition(":")
    method_type = getattr(import_module(module), cls)
    known = signature(method_type).parameters
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise MapperError(f"{name} has no option {unknown[0]!r}; allowed: {', '.join(known) or 'none'}")
    method: Method = method_type(**options)
    return method
