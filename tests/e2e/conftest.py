"""The stack that the tests share, and the check that an answer is right."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.conversations import Messages
from tests.e2e.running import NO_HEALTH_CHECKS, NUM_TOKENS, Client, Cluster, Reply, running, settings_of
from workers.families import Family
from workers.families.tiny import family as tiny_family
from workers.reference import Reference


class AssertRight(Protocol):
    """Assert that an answer is right, as its path defines it."""

    def __call__(self, reply: Reply, messages: Messages, num_tokens: int = NUM_TOKENS) -> None: ...


@pytest.fixture(scope="package")
def family() -> Family:
    return tiny_family()


@pytest.fixture(scope="package")
def misfit(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The large model with one weight changed. The bundle does not fit it."""
    folder = Path(shutil.copytree(family.target, tmp_path_factory.mktemp("misfit") / "model"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="package")
def reference(family: Family, misfit: Path) -> Iterator[Reference]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Reference({"small": family.source, "large": family.target, "misfit": misfit}, family.bundle)
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def assert_right(reference: Reference) -> AssertRight:
    """A mapped answer must equal the offline replay, any other the native answer of its model."""

    def check(reply: Reply, messages: Messages, num_tokens: int = NUM_TOKENS) -> None:
        num_mapped = reply.report["mapped_tokens"] if reply.path in ("mapped", "hybrid") else 0
        expected = reference.expected(reply.report["tier"], messages, num_mapped, num_tokens)
        reference.check(reply.body, expected)

    return check


@pytest.fixture(scope="package")
def cluster(family: Family, misfit: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Workers for small, misfit and large, and a gateway. A test that breaks something repairs it."""
    with running(settings_of(family, "e2e", misfit), tmp_path_factory.mktemp("e2e")) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def unpolled(cluster: Cluster) -> Iterator[Client]:
    """A gateway without health checks: it learns from its own calls only."""
    with cluster.gateway("unpolled", **NO_HEALTH_CHECKS) as client:
        yield client
