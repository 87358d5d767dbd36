"""One stack for all tests, since a start takes long; and the oracle that says whether an answer is right."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.running import NEVER_LOOKS, NUM_TOKENS, Client, Cluster, Reply, running, settings_of
from tests.e2e.talks import Talk
from workers.families import Family
from workers.families.tiny import family as tiny_family
from workers.reference import Reference


class Right(Protocol):
    """Asserts that an answer to a conversation is right, as its path defines it."""

    def __call__(self, reply: Reply, talk: Talk, num_tokens: int = NUM_TOKENS) -> None: ...


@pytest.fixture(scope="package")
def family() -> Family:
    return tiny_family()


@pytest.fixture(scope="package")
def misfit(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The large model with one weight changed: other weights than the bundle was fitted for."""
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
def right(reference: Reference) -> Right:
    """Mapped answers equal the offline replay, all others the native answer of the model that gave them."""

    def assert_right(reply: Reply, talk: Talk, num_tokens: int = NUM_TOKENS) -> None:
        num_mapped = reply.told["mapped_tokens"] if reply.path in ("mapped", "hybrid") else 0
        expected = reference.expected(reply.told["tier"], talk, num_mapped, num_tokens)
        reference.check(reply.body, expected)

    return assert_right


@pytest.fixture(scope="package")
def cluster(family: Family, misfit: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Small and large, and between them a tier whose model the bundle was not fitted for. A test that breaks something
    mends it."""
    with running(settings_of(family, "e2e", misfit), tmp_path_factory.mktemp("e2e")) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def blind(cluster: Cluster) -> Iterator[Client]:
    """A gateway that learns of its workers' fate by its own calls only."""
    with cluster.gateway("blind", **NEVER_LOOKS) as client:
        yield client
