"""`hidden`: the target's hidden states from the source's keys and values; the target's own projections do the rest."""

from __future__ import annotations

from typing import ClassVar

from mappers.methods.ridge import Ridge


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
