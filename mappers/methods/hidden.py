"""`hidden`: the target's hidden states from the source's keys and values; the target's own projections do the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mappers.cache import KVCache, rows_of
from mappers.errors import UnsupportedModel
from mappers.manifest import KINDS, Kind
from mappers.methods import Solution
from mappers.methods.ridge import Ridge
from mappers.models import body


class Hidden(Ridge):
    """Ridge regression from keys and values together to the normed hidden state that the target projects.

        hidden = x @ B + b,    keys = hidden @ W_k + b_k,    values = hidden @ W_v + b_v

    Keys and values of a layer come from the same source layers. Both steps are linear, so they are stored as one:
    with equal source layers and penalty this is ridge regression onto the keys and values themselves,
    (X'X + P)^-1 X'(H W) = ((X'X + P)^-1 X'H) W, and differs from it only in what layers and penalty are chosen by.
    Where the target norms its keys after projecting them it can't be used.
    """

    name = "hidden"
    predicts_hidden: ClassVar[bool] = True


TOLERANCE = 1e-3  # relative; two ways to the same float32 product differ by far less
ROUNDED_TOLERANCE = 3e-2  # of states in float16 and bfloat16, which keep 11 and 8 bits


@dataclass(frozen=True)
class Projection:
    """keys (or values) = states @ weight + bias, before RoPE; weight (hidden, W), bias (W,), float64."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, linear: nn.Linear) -> Projection:
        weight = linear.weight.double().T
        return cls(weight, linear.bias.double() if linear.bias is not None else weight.new_zeros(weight.shape[1]))


Projections = list[dict[Kind, Projection]]


def projections(model: Any) -> Projections:
    """Those of every layer. Raises `UnsupportedModel` where keys are more than a linear map of the hidden state."""
    return [{kind: Projection.of(_linear(model, layer, kind)) for kind in KINDS} for layer in range(_num_layers(model))]


def projected(solution: Solution, projection: Projection) -> Solution:
    """A map to hidden states and their projection, as one map."""
    weight = solution.weight @ projection.weight
    return Solution(weight, solution.bias @ projection.weight + projection.bias, solution.ridge)


@contextmanager
def listened(model: Any) -> Iterator[dict[int, Tensor]]:
    """While this lasts, collects the normed hidden states (T, hidden) of every layer as `model` reads."""
    states: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            new = arguments[0][0]
            states[layer] = torch.cat([states[layer], new]) if layer in states else new

        return hook

    with ExitStack() as hooks:
        for layer in range(_num_layers(model)):
            handle = _linear(model, layer, "keys").register_forward_pre_hook(keep(layer))
            hooks.callback(handle.remove)
        yield states


def check_projections(found: Projections, states: Mapping[int, Tensor], plain: KVCache) -> None:
    """Raise `UnsupportedModel` unless the projections of these states are this position-free cache."""
    for layer, hidden in states.items():
        for kind in KINDS:
            projection = found[layer][kind]
            held = rows_of(plain.of(kind)[layer]).double()
            error = float((hidden.double() @ projection.weight + projection.bias - held).norm() / held.norm())
            if error > (TOLERANCE if hidden.dtype == torch.float32 else ROUNDED_TOLERANCE):
                raise UnsupportedModel(
                    f"method hidden: the {kind} of layer {layer} are not the projection of its hidden states (off by "
                    f"{error:.1%}); allowed: another method"
                )


def _num_layers(model: Any) -> int:
    return int(model.config.num_hidden_layers)


def _linear(model: Any, layer: int, kind: Kind) -> nn.Linear:
    attention = getattr(body(model).layers[layer], "self_attn", None)  # type: ignore[index]
    linear = getattr(attention, "k_proj" if kind == "keys" else "v_proj", None)
    if not isinstance(linear, nn.Linear):
        raise UnsupportedModel(
            f"method hidden: {type(model).__name__} has no projection of its own for {kind}; allowed: another method"
        )
    if hasattr(attention, "k_norm"):
        raise UnsupportedModel(
            f"method hidden: {type(model).__name__} norms its keys after projecting them, so that no linear map of "
            f"hidden states gives them; allowed: another method"
        )
    return linear
