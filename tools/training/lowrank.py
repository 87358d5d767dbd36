"""Low-rank adapters on a layer's linear maps, and the files they are kept in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


class LowRank(nn.Module):
    """`linear(x) + B A x` with a frozen `linear`; A is random, B zero, so that training starts at the pruned model.

    Source: LoRA, https://arxiv.org/abs/2106.09685.
    """

    def __init__(self, linear: nn.Linear, rank: int, generator: torch.Generator):
        super().__init__()
        self.linear = linear
        out_features, in_features = linear.weight.shape
        self.A = nn.Parameter(torch.randn(rank, in_features, generator=generator) / math.sqrt(in_features))
        self.B = nn.Parameter(torch.zeros(out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + (x @ self.A.T) @ self.B.T  # type: ignore[no-any-return]


def attach(layer: nn.Module, rank: int, generator: torch.Generator, frozen: Sequence[str] = ()) -> None:
    """Put an adapter on every linear map below `layer`, but not on those named in `frozen`."""
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(parent, LowRank) and name not in frozen:
                setattr(parent, name, LowRank(child, rank, generator))


def adapters(layers: nn.Module) -> Iterator[tuple[str, LowRank]]:
    """Each adapter with the name of the linear map that it changes, as in `5.self_attn.q_proj`."""
    return ((name, module) for name, module in layers.named_modules() if isinstance(module, LowRank))


def save(path: Path, layers: nn.Module, metadata: dict[str, str]) -> None:
    """Write the adapters in float16, whole or not at all."""
    tensors = {
        f"{name}.{side}": getattr(module, side).detach().half().contiguous()
        for name, module in adapters(layers)
        for side in ("A", "B")
    }
    scratch = path.with_suffix(".partial")
    save_file(tensors, scratch, metadata=metadata)
    scratch.replace(path)


@torch.no_grad()
def load_into(path: Path, layers: nn.Module) -> None:
    """Set the adapters of `layers` to those of a file. Raises `ValueError` if they are not the same ones."""
    with safe_open(path, framework="pt") as file:
        wanted = {f"{name}.{side}": getattr(module, side) for name, module in adapters(layers) for side in ("A", "B")}
        if wanted.keys() != set(file.keys()):
            raise ValueError(f"{path} holds {len(file.keys()) // 2} adapters for other layers than these")
        for name, parameter in wanted.items():
            parameter.copy_(file.get_tensor(name))
