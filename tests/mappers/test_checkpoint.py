"""A fit that is killed goes on where it stood, or is told why it can't."""

from __future__ import annotations

import resource
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mappers import Mapper
from mappers.checkpoint import Checkpoint, CheckpointState
from mappers.collect import defer_interrupts
from mappers.copies import CopyFinder
from mappers.errors import CheckpointMismatch, DataUnreadable, MapperError
from mappers.stats import BATCH, RowAccumulator
from tests.mappers.pairs import fit_with


class Killed(Exception):
    pass


def killed_after(documents: list[list[int]], count: int) -> Iterator[list[int]]:
    yield from documents[:count]
    raise Killed


@pytest.fixture(scope="module")
def left(folders: dict[str, Path], documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a fit leaves that was killed after ten documents."""
    path = tmp_path_factory.mktemp("left") / "partial"
    with pytest.raises(Killed):
        fitted(folders, killed_after(documents, 10), path)
    return path


@pytest.fixture
def file(left: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(left, tmp_path / "partial"))


def fitted(folders: dict[str, Path], documents: Any, checkpoint: Path | None, **changes: Any) -> Mapper:
    """From `sibling`, some layers of which are copies."""
    given = {"layers": 1, "weighting": "attention", "tokens": 1500, "checkpoint_s": 0, **changes}
    models = {"source": folders["sibling"], "target": folders["large"], **given}
    return fit_with(documents=documents, checkpoint=checkpoint, **models)


def test_a_fit_that_was_killed_goes_on_and_ends_the_same(
    folders: dict[str, Path], documents: list[list[int]], file: Path
) -> None:
    told: list[int] = []
    resumed = fitted(folders, documents, file, progress=lambda done, _: told.append(done))
    assert told[0] == 11 * 96 and told[-1] == 16 * 96  # the first ten are not read again
    assert resumed.bundle_id == fitted(folders, documents, None).bundle_id
    assert resumed.manifest.copied_layers == (0, 1)


def test_kept_statistics_serve_other_methods_and_more_tokens(
    folders: dict[str, Path], documents: list[list[int]], tmp_path: Path
) -> None:
    file = tmp_path / "statistics"
    read: list[int] = []
    steps: list[tuple[dict[str, Any], int]] = [
        ({"tokens": 900}, 10),
        ({"tokens": 900, "method": "lowrank"}, 0),
        ({"tokens": 1500}, 6),
    ]
    for change, num_read in steps:
        read.clear()
        mapper = fitted(
            folders, documents, file, keep_checkpoint=True, progress=lambda done, _: read.append(done), **change
        )
        assert len(read) == num_read
        assert mapper.bundle_id == fitted(folders, documents, None, **change).bundle_id


def interrupting(documents: list[list[int]], count: int) -> Iterator[list[int]]:
    yield from documents[:count]
    raise KeyboardInterrupt


def unreadable(documents: list[list[int]], count: int) -> Iterator[list[int]]:
    yield from documents[:count]
    raise DataUnreadable("the rest is broken")


@pytest.mark.parametrize("broken_off", [interrupting, unreadable])
def test_what_was_read_before_an_interrupt_is_kept(
    folders: dict[str, Path], documents: list[list[int]], tmp_path: Path, broken_off: Any
) -> None:
    file, read = tmp_path / "partial", list[int]()
    with pytest.raises((KeyboardInterrupt, DataUnreadable)):
        fitted(folders, broken_off(documents, 10), file, checkpoint_s=3600)
    resumed = fitted(folders, documents, file, progress=lambda done, _: read.append(done))
    assert read[0] == 11 * 96
    assert resumed.bundle_id == fitted(folders, documents, None).bundle_id


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_what_must_not_be_left_half_done() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)  # as ignored as ever


def test_a_disk_that_is_full_leaves_what_was_saved(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "partial", {"head": 4}, every_s=0)
    checkpoint.save(CheckpointState({"x": torch.ones(3)}, {"num_documents": 1}))
    with without_room(), pytest.raises(MapperError, match="cannot write .*partial: "):
        checkpoint.save(CheckpointState({"x": torch.ones(100_000)}, {"num_documents": 2}))
    saved = checkpoint.load()
    assert saved is not None and saved.num_documents == 1
    assert [path.name for path in tmp_path.iterdir()] == ["partial"]


@contextmanager
def without_room() -> Iterator[None]:
    """No file of this process may grow beyond a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, heard)


@pytest.mark.parametrize("is_folded", [False, True])
def test_what_was_gathered_goes_on_to_the_last_bit(tmp_path: Path, is_folded: bool) -> None:
    x, y = torch.randn(3 * BATCH, 6), torch.randn(3 * BATCH, 2)
    weights = torch.rand(3 * BATCH, dtype=torch.float64)
    whole, begun, resumed = RowAccumulator(6, 2), RowAccumulator(6, 2), RowAccumulator(6, 2)
    for gathered in (whole, begun):
        gathered.update(x[:BATCH], y[:BATCH], weights[:BATCH])
        if is_folded:
            gathered.fold()
        gathered.update(x[BATCH : 2 * BATCH + 300], y[BATCH : 2 * BATCH + 300], weights[BATCH : 2 * BATCH + 300])
    checkpoint = Checkpoint(tmp_path / "partial", {}, every_s=0)
    checkpoint.save(CheckpointState.of([begun], CopyFinder({}), 1, 2, "0"))
    assert checkpoint.path.stat().st_mode & 0o777 == 0o600
    saved = checkpoint.load()
    assert saved is not None
    saved.fill([resumed])
    for gathered in (whole, resumed):
        gathered.update(x[2 * BATCH + 300 :], y[2 * BATCH + 300 :], weights[2 * BATCH + 300 :])
    assert (resumed.count, resumed.effective) == (whole.count, whole.effective)
    ours, theirs = resumed.fold(), whole.fold()
    for part in ("mean_x", "mean_y", "xx", "xy", "yy"):
        assert torch.equal(getattr(ours, part), getattr(theirs, part))
    assert ours.resolution == theirs.resolution


def test_statistics_of_an_older_version_are_read(tmp_path: Path) -> None:
    """They hold moments alone, of float64 products."""
    gathered, resumed = RowAccumulator(6, 2), RowAccumulator(6, 2)
    gathered.update(torch.randn(50, 6, dtype=torch.float64), torch.randn(50, 2, dtype=torch.float64))
    gathered.fold()
    saved = CheckpointState.of([gathered], CopyFinder({}), 1, 2, "0")
    CheckpointState(saved.tensors, {"counts": [saved.facts["counts"][0][:3]]}).fill([resumed])
    assert torch.equal(resumed.fold().gram(), gathered.fold().gram())
    assert (resumed.count, resumed.fold().resolution) == (50, gathered.fold().resolution)


def test_nothing_is_saved_before_it_is_time(
    folders: dict[str, Path], documents: list[list[int]], tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        fit_with(
            folders["twin"],
            folders["large"],
            killed_after(documents, 4),
            checkpoint=tmp_path / "partial",
            checkpoint_s=3600,
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": 5}, "was written with head 4, not 5; use the same settings or remove it"),
        ({"joint": True}, "was written with joint False, not True"),
        ({"weighting": "uniform"}, "was written with weighting 'attention', not 'uniform'"),
        ({"tokens": 864}, "holds 960 tokens; allowed: at most 864"),
        ({"source": "twin"}, "was written with source '[0-9a-f]{64}', not '[0-9a-f]{64}'"),
    ],
)
def test_other_settings_or_models_are_refused(
    folders: dict[str, Path], documents: list[list[int]], file: Path, changes: dict[str, Any], message: str
) -> None:
    changes = {name: folders.get(value, value) if name == "source" else value for name, value in changes.items()}
    with pytest.raises(CheckpointMismatch, match=message):
        fitted(folders, documents, file, **changes)
    assert file.exists()


def test_other_documents_are_refused(folders: dict[str, Path], documents: list[list[int]], file: Path) -> None:
    changed = [list(ids) for ids in documents]
    changed[9][50] += 1 if changed[9][50] == 0 else -1
    for others in (changed, documents[:5]):
        with pytest.raises(CheckpointMismatch, match="first 10 documents differ from those given"):
            fitted(folders, others, file)


@pytest.mark.parametrize("content", [b"", b"no tensors", None])
def test_what_is_no_checkpoint_is_refused(
    folders: dict[str, Path], documents: list[list[int]], file: Path, content: bytes | None
) -> None:
    file.write_bytes(file.read_bytes()[:1000] if content is None else content)
    with pytest.raises(CheckpointMismatch, match="is not a checkpoint of a fit"):
        fitted(folders, documents, file)


class Looking(Mapping[str, torch.Tensor]):
    """One tensor, and the modes that the file beside has when it is asked for it."""

    def __init__(self, file: Path):
        self._file = file
        self.modes: list[int] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.modes.append(self._file.stat().st_mode & 0o777)
        return torch.ones(3)

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


def test_nobody_else_can_look_while_it_is_written(tmp_path: Path) -> None:
    left = tmp_path / "partial.new"  # by a run that was killed
    left.touch(mode=0o644)
    looking = Looking(left)
    Checkpoint(tmp_path / "partial", {}, every_s=0).save(CheckpointState(looking, {}))
    assert looking.modes == [0o600]
    assert (tmp_path / "partial").stat().st_mode & 0o777 == 0o600


def test_a_failed_save_leaves_what_was_saved_before(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "partial", {"head": 4}, every_s=0)
    checkpoint.save(CheckpointState({"x": torch.ones(3)}, {"num_documents": 1}))
    with pytest.raises(ValueError, match="non contiguous"):
        checkpoint.save(CheckpointState({"x": torch.ones(3, 2).T}, {"num_documents": 2}))
    saved = checkpoint.load()
    assert saved is not None and saved.num_documents == 1
    assert [path.name for path in tmp_path.iterdir()] == ["partial"]
