"""Linear layers that compute each row of a batch as they would compute it alone, to the last bit.

A product of a matrix with several rows at once sums in another order than one with a single row, so an answer would
depend on what else runs. What makes a batch cheap is not that product, though: it is that the weights come from memory
once. So each block of them is multiplied with one row after the other, while the processor's cache still holds it:

    block of the weight    |████|....|....|    row 0, row 1, row 2, then the next block

A matrix times one row runs on one thread in MKL, and one thread does not fill the way to the memory. As a batch of
products, a part of the block each, it runs on all: on two cores in six tenths of the time.

A prompt's tokens are one product, with the factors turned: MKL cuts the first one into panels for its threads, which
should be the large one. At 4 tokens that takes six tenths of the time, at 64 four fifths.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BLOCK_BYTES = 4 * 2**20
ALIGNED = 64  # rows of a block come in so many, which most numbers of threads divide


class RowwiseLinear(nn.Linear):
    """`linear` once more, over the same parameters. Rows of a batch are `(B, 1, in)`, prompts `(1, T, in)`."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._block_rows = max(1, BLOCK_BYTES // linear.weight[0].nbytes // ALIGNED) * ALIGNED

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim != 3:
            return super().forward(input)
        if input.shape[1] != 1:
            return _turned(input, self.weight, self.bias)
        tokens = input.unbind(0)  # (1, in) each
        weights = self.blocks_of(self.weight)
        biases = [None] * len(weights) if self.bias is None else self.blocks_of(self.bias)
        blocks = [
            _joined([_shared_product(token, weight, bias) for token in tokens], dim=0)
            for weight, bias in zip(weights, biases, strict=True)
        ]  # (B, part of out) each
        return _joined(blocks, dim=1).unsqueeze(1)  # (B, 1, out)

    def blocks_of(self, parameter: Tensor) -> list[Tensor]:
        """The weight or the bias, cut between the blocks."""
        rows = self._block_rows
        return [parameter[begin : begin + rows] for begin in range(0, len(parameter), rows)]


def _shared_product(token: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`token @ weight.t() + bias` of `(1, in)`, `(1, out)`, the weight's rows shared out among the threads."""
    size = len(weight)
    parts = next(n for n in range(torch.get_num_threads(), 0, -1) if size % n == 0)
    shares = weight.view(parts, size // parts, -1)
    product = torch.bmm(shares, token.t().expand(parts, -1, 1)).view(1, size)
    return product if bias is None else product + bias


def _turned(chunk: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`chunk @ weight.t() + bias` of `(..., T, in)`, as (weight @ chunk.t()).t()."""
    product = torch.mm(weight, chunk.flatten(0, -2).t()).t().contiguous()  # (T, out)
    if bias is not None:
        product += bias
    return product.view(*chunk.shape[:-1], len(weight))


def make_rowwise(model: nn.Module) -> None:
    """Put `RowwiseLinear` in the place of every linear layer of `model`, over the same parameters."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, RowwiseLinear(child))


def _joined(parts: list[Tensor], *, dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
