"""Mapping methods by name. A method's module is imported when it is asked for."""

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
    """The method `name`, built with its options. Raises `UnknownMethod`, or `MapperError` for an option it lacks."""
    if name not in METHODS:
        raise UnknownMethod(f"unknown mapper {name!r}; known: {', '.join(sorted(METHODS))}")
    module, _, cls = METHODS[name].partition(":")
    built = getattr(import_module(module), cls)
    known = signature(built).parameters
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise MapperError(f"{name} has no option {unknown[0]!r}; allowed: {', '.join(known) or 'none'}")
    method: Method = built(**options)
    return method
