"""`hidden`: predicts the target's hidden states, which the target's own projections turn into keys and values."""

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
from mappers.methods.base import Solution
from mappers.methods.ridge import Ridge
from mappers.models import body

TOLERANCE = 1e-3  # relative; two ways to compute one float32 product differ by far less
ROUNDED_TOLERANCE = 3e-2  # for float16 and bfloat16, which keep 11 and 8 bits


class Hidden(Ridge):
    """Ridge regression from keys and values together to the normed hidden state that the target projects.

        hidden = x @ B + b,    keys = hidden @ W_k + b_k,    values = hidden @ W_v + b_v

    Keys and values of a layer share their source layers. Both steps are linear and stored as one matrix. For equal
    source layers and penalty the result is ridge regression onto keys and values directly,
    (X'X + P)^-1 X'(H W) = ((X'X + P)^-1 X'H) W; only the criterion for choosing layers and penalty differs.
    Not applicable if the target norms its keys after the projection.
    """

    name = "hidden"
    predicts_hidden: ClassVar[bool] = True


@dataclass(frozen=True)
class Projection:
    """keys (or values) = states @ weight + bias, before RoPE; weight (hidden, W), bias (W,), float64."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, linear: nn.Linear) -> Projection:
        weight = linear.weight.double().T
        return cls(weight, linear.bias.double() if linear.bias is not None else weight.new_zeros(weight.shape[1]))


Projections = list[dict[Kind, Projection]]  # by layer


def projections(model: Any) -> Projections:
    """Return the key and value projections of every layer.

    Raises `UnsupportedModel` if keys are not a linear map of the hidden state.
    """
    return [{kind: Projection.of(_linear(model, layer, kind)) for kind in KINDS} for layer in range(_num_layers(model))]


def project(solution: Solution, projection: Projection) -> Solution:
    """Compose a map to hidden states with a projection."""
    weight = solution.weight @ projection.weight
    return Solution(weight, solution.bias @ projection.weight + projection.bias, solution.ridge)


@contextmanager
def record_hidden_states(model: Any) -> Iterator[dict[int, Tensor]]:
    """Collect the normed hidden states (T, hidden) of every layer while `model` runs in the block."""
    states: dict[int, Tensor] = {}

    def hook_for(layer: int) -> Any:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            new = arguments[0][0]
            states[layer] = torch.cat([states[layer], new]) if layer in states else new

        return hook

    with ExitStack() as hooks:
        for layer in range(_num_layers(model)):
            handle = _linear(model, layer, "keys").register_forward_pre_hook(hook_for(layer))
            hooks.callback(handle.remove)
        yield states


def check_projections(found: Projections, states: Mapping[int, Tensor], cache: KVCache) -> None:
    """Raise `UnsupportedModel` unless projecting the hidden `states` gives `cache`, whose keys carry no RoPE."""
    for layer, hidden in states.items():
        for kind in KINDS:
            projection = found[layer][kind]
            rows = rows_of(cache.of(kind)[layer]).double()
            error = float((hidden.double() @ projection.weight + projection.bias - rows).norm() / rows.norm())
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
            f"method hidden: {type(model).__name__} has no separate projection for {kind}; allowed: another method"
        )
    if hasattr(attention, "k_norm"):
        raise UnsupportedModel(
            f"method hidden: {type(model).__name__} norms its keys after the projection, so they are not a linear map "
            f"of hidden states; allowed: another method"
        )
    return linear
