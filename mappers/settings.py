"""`FitSettings`: all choices of a fit, with their defaults and the help texts of `kvrelay fit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from mappers import methods
from mappers.errors import MapperError
from mappers.manifest import DEFAULT_HEAD, KINDS, LICENCE, Kind, Precision, QualityGate, Target
from mappers.methods import Method

AUTO = "auto"
Layers = int | Literal["auto"]
Choose = Literal["attention", "forward", "top"]
Weighting = Literal["uniform", "attention"]
Wanted = tuple[Literal["keys", "values", "hidden"], int]  # keys, values or hidden states of one target layer


def _option(default: Any, help: str, **arguments: Any) -> Any:
    """Declare a field that is also an option of `kvrelay fit`; `arguments` go to `add_argument`."""
    return field(default=default, metadata={"help": help, **arguments})


@dataclass(frozen=True)
class FitSettings:
    """How a mapper is fitted. Raises `MapperError` for values that no fit can use.

    `method_options` are passed to the method. `layers` bounds the source layers per target layer; `auto` takes as many
    as improve the map and as the tokens allow. The first `head` tokens of each document are skipped: they are attention
    sinks of large norm, and the target prefills them itself. `tokens` bounds the calibration data, None takes all.
    Models are loaded in `dtype`; statistics are float32 products with float64 sums in any case. Statistics are saved to
    the file `checkpoint` every `checkpoint_s` seconds, and at the end if `keep_checkpoint`.
    """

    method: str = _option("ridge", f"one of {', '.join(sorted(methods.METHODS))}")
    method_options: Mapping[str, Any] = field(default_factory=dict)
    layers: Layers = _option(4, f"max source layers per target layer, or {AUTO}")
    joint: bool = _option(False, "predict keys and values each from source keys and values together")
    copies: bool = _option(True, "fit layers that both models share like any other")
    choose: Choose = _option("top", f"how source layers are chosen: {', '.join(get_args(Choose))}")
    weighting: Weighting = _option("uniform", f"weights of calibration tokens: {', '.join(get_args(Weighting))}")
    effective_share: float = _option(
        0.5, "token weights are shrunk to an effective sample size of at least this share of the tokens"
    )
    tokens: int | None = _option(None, "calibration tokens", type=int)
    head: int = _option(DEFAULT_HEAD, "first tokens of each document to skip")
    precision: Precision = _option("float16", "precision of the stored weights", choices=get_args(Precision))
    device: str = "cpu"
    dtype: str = "float32"
    data: str = "unnamed"
    gate: QualityGate | None = None
    licence: str = LICENCE
    checkpoint: str | Path | None = None
    checkpoint_s: float = 300.0
    keep_checkpoint: bool = False

    def __post_init__(self) -> None:
        method = self.mapping_method
        if self.choose not in get_args(Choose):
            raise MapperError(f"choose is {self.choose!r}; allowed: {', '.join(get_args(Choose))}")
        if self.weighting not in get_args(Weighting):
            raise MapperError(f"weighting is {self.weighting!r}; allowed: {', '.join(get_args(Weighting))}")
        if not 0 < self.effective_share <= 1:
            raise MapperError(f"effective_share is {self.effective_share}; allowed: above 0, up to 1")
        if self.tokens is not None and self.tokens < 1:
            raise MapperError(f"tokens is {self.tokens}; allowed: 1 or more")
        if self.joint and method.max_layers:
            raise MapperError(f"method {method.name} does not support joint; allowed: methods of several source layers")
        if self.layers != AUTO and (isinstance(self.layers, str) or self.layers < 1):
            raise MapperError(f"layers is {self.layers}; allowed: 1 or more, or {AUTO}")
        if self.head < 0:
            raise MapperError(f"head is {self.head}; allowed: 0 or more")
        if self.precision not in get_args(Precision):
            raise MapperError(f"precision is {self.precision!r}; allowed: {', '.join(get_args(Precision))}")

    @cached_property
    def mapping_method(self) -> Method:
        return methods.get(self.method, **self.method_options)

    @property
    def hidden(self) -> bool:
        """Whether hidden states of the target are predicted, which it projects to keys and values."""
        return self.mapping_method.predicts_hidden

    @property
    def feature_kinds(self) -> list[tuple[Kind, ...]]:
        """Kinds of source states that form one set of features each."""
        return [KINDS] if self.joint or self.hidden else [("keys",), ("values",)]

    def wanted(self, kinds: tuple[Kind, ...], num_layers: int, copies: Mapping[Target, int]) -> list[Wanted]:
        """Return what is predicted from features of these kinds, without the layers that are copied."""
        layers = range(num_layers)
        if self.hidden:
            return [("hidden", i) for i in layers if not all((kind, i) in copies for kind in KINDS)]
        return [(kind, i) for kind in kinds for i in layers if (kind, i) not in copies]

    def max_layers(self, num_layers: int, auto: int) -> int:
        """Return the max source layers per target layer out of `num_layers`; `auto` is the max for automatic choice."""
        most = auto if isinstance(self.layers, str) else self.layers
        return min(most, num_layers, self.mapping_method.max_layers or most)

    def checkpoint_key(self) -> dict[str, Any]:
        """Return the settings that the statistics depend on. Checkpoints with other values are refused."""
        names = ("joint", "copies", "head", "hidden", "weighting", "effective_share")
        # Absent in older checkpoints, which are all of float32 models.
        dtype = {} if self.dtype == "float32" else {"dtype": self.dtype}
        return {name: getattr(self, name) for name in names} | dtype

    def manifest_options(self) -> dict[str, Any]:
        """Return the settings that the manifest records as `options`."""
        options: dict[str, Any] = {"layers": self.layers, "joint": self.joint, "choose": self.choose}
        options["weighting"] = self.weighting
        if self.weighting != "uniform":
            options["effective_share"] = self.effective_share
        if self.dtype != "float32":
            options["dtype"] = self.dtype
        return options | dict(self.method_options)
