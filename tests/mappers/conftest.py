from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mappers import Mapper
from tests.mappers.pairs import disguised, fit_with, llama, pruned, random_documents, saved


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use one thread, and keep the user's own cache folder untouched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRELAY_HOME", str(tmp_path_factory.mktemp("home")))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders: `large`; `twin`, the same function with other keys and values; `sibling`, layers 0, 1 and 3 of
    `large`; `other`, unrelated and of another depth and width."""
    root = tmp_path_factory.mktemp("models")
    large = llama(1, 4)
    made = {"large": large, "twin": disguised(large), "sibling": pruned(large, [0, 1, 3]), "other": llama(2, 3, 48)}
    return {name: saved(model, root / name) for name, model in made.items()}


@pytest.fixture(scope="session")
def documents() -> list[list[int]]:
    return random_documents(24, 96)


@pytest.fixture(scope="session")
def twin_mapper(folders: dict[str, Path], documents: list[list[int]]) -> Mapper:
    """From `twin` to `large`: an exact linear map exists and must be found."""
    return fit_with(folders["twin"], folders["large"], documents, precision="float32", data="noise", ridges=(1e-9,))


@pytest.fixture(scope="session")
def sibling_mapper(folders: dict[str, Path], documents: list[list[int]]) -> Mapper:
    """From `sibling` to `large`: layers 0 and 1 are equal."""
    return fit_with(folders["sibling"], folders["large"], documents, precision="float32", data="noise")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise `KeyboardInterrupt`, which background jobs ignore; restore the handler afterwards."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)
