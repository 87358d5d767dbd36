"""A killed fit resumes from its checkpoint, or reports why it cannot."""

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
from mappers.errors import CheckpointMismatch, DataUnreadable, MapperError
from mappers.stats import BATCH, RowAccumulator
from tests.mappers.pairs import fit_with


class Killed(Exception):
    pass


def killed_after(documents: list[list[int]], count: int) -> Iterator[list[int]]:
    yield from documents[:count]
    raise Killed


@pytest.fixture(scope="module")
def checkpoint_file(
    folders: dict[str, Path], documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Checkpoint of a fit that was killed after ten documents."""
    path = tmp_path_factory.mktemp("left") / "partial"
    with pytest.raises(Killed):
        fit_sibling(folders, killed_after(documents, 10), path)
    return path


@pytest.fixture
def file(checkpoint_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(checkpoint_file, tmp_path / "partial"))


def fit_sibling(folders: dict[str, Path], documents: Any, checkpoint: Path | None, **changes: Any) -> Mapper:
    """Fit from `sibling`, some layers of which are copies."""
    given = {"layers": 1, "weighting": "attention", "tokens": 1500, "checkpoint_s": 0, **changes}
    models = {"source": folders["sibling"], "target": folders["large"], **given}
    return fit_with(documents=documents, checkpoint=checkpoint, **models)


def test_a_killed_fit_resumes_to_the_same_result(
    folders: dict[str, Path], documents: list[list[int]], file: Path
) -> None:
    progress: list[int] = []
    resumed = fit_sibling(folders, documents, file, progress=lambda done, _: progress.append(done))
    assert progress[0] == 11 * 96 and progress[-1] == 16 * 96  # the first ten are not prefilled again
    assert resumed.bundle_id == fit_sibling(folders, documents, None).bundle_id
    assert resumed.manifest.copied_layers == (0, 1)


def test_kept_statistics_serve_other_methods_and_more_tokens(
    folders: dict[str, Path], documents: list[list[int]], tmp_path: Path
) -> None:
    file = tmp_path / "statistics"
    prefilled: list[int] = []
    steps: list[tuple[dict[str, Any], int]] = [
        ({"tokens": 900}, 10),
        ({"tokens": 900, "method": "lowrank"}, 0),
        ({"tokens": 1500}, 6),
    ]
    for change, num_prefilled in steps:
        prefilled.clear()
        mapper = fit_sibling(
            folders, documents, file, keep_checkpoint=True, progress=lambda done, _: prefilled.append(done), **change
        )
        assert len(prefilled) == num_prefilled
        assert mapper.bundle_id == fit_sibling(folders, documents, None, **change).bundle_id


def interrupting(documents: list[list[int]], count: int) -> Iterator[list[int]]:
    yield from documents[:count]
    raise KeyboardInterrupt


def unreadable(documents: list[list[int]], count: int) -> Iterator[list[int]]:
    yield from documents[:count]
    raise DataUnreadable("the rest is malformed")


@pytest.mark.parametrize("stream", [interrupting, unreadable])
def test_an_interrupt_saves_the_documents_so_far(
    folders: dict[str, Path], documents: list[list[int]], tmp_path: Path, stream: Any
) -> None:
    file, prefilled = tmp_path / "partial", list[int]()
    with pytest.raises((KeyboardInterrupt, DataUnreadable)):
        fit_sibling(folders, stream(documents, 10), file, checkpoint_s=3600)
    resumed = fit_sibling(folders, documents, file, progress=lambda done, _: prefilled.append(done))
    assert prefilled[0] == 11 * 96
    assert resumed.bundle_id == fit_sibling(folders, documents, None).bundle_id


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_is_deferred_to_the_end_of_the_block() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        done.append("everything")
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)  # still ignored


def test_a_full_disk_leaves_the_saved_state(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "partial", {"head": 4}, every_s=0)
    checkpoint.save(CheckpointState({"x": torch.ones(3)}, {"num_documents": 1}))
    with limited_file_size(), pytest.raises(MapperError, match="cannot write .*partial: "):
        checkpoint.save(CheckpointState({"x": torch.ones(100_000)}, {"num_documents": 2}))
    saved = checkpoint.load()
    assert saved is not None and saved.num_documents == 1
    assert [path.name for path in tmp_path.iterdir()] == ["partial"]


@contextmanager
def limited_file_size() -> Iterator[None]:
    """Let no file of this process grow beyond 4 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("is_folded", [False, True])
def test_a_resumed_accumulator_is_bit_identical(tmp_path: Path, is_folded: bool) -> None:
    x, y = torch.randn(3 * BATCH, 6), torch.randn(3 * BATCH, 2)
    weights = torch.rand(3 * BATCH, dtype=torch.float64)
    whole, begun, resumed = RowAccumulator(6, 2), RowAccumulator(6, 2), RowAccumulator(6, 2)
    for accumulator in (whole, begun):
        accumulator.update(x[:BATCH], y[:BATCH], weights[:BATCH])
        if is_folded:
            accumulator.fold()
        accumulator.update(x[BATCH : 2 * BATCH + 300], y[BATCH : 2 * BATCH + 300], weights[BATCH : 2 * BATCH + 300])
    checkpoint = Checkpoint(tmp_path / "partial", {}, every_s=0)
    checkpoint.save(CheckpointState.of([begun], [], 1, 2, "0"))
    assert checkpoint.path.stat().st_mode & 0o777 == 0o600
    saved = checkpoint.load()
    assert saved is not None
    saved.fill([resumed])
    for accumulator in (whole, resumed):
        accumulator.update(x[2 * BATCH + 300 :], y[2 * BATCH + 300 :], weights[2 * BATCH + 300 :])
    assert (resumed.count, resumed.effective) == (whole.count, whole.effective)
    found, expected = resumed.fold(), whole.fold()
    for part in ("mean_x", "mean_y", "xx", "xy", "yy"):
        assert torch.equal(getattr(found, part), getattr(expected, part))
    assert found.resolution == expected.resolution


def test_statistics_of_an_older_version_are_loaded(tmp_path: Path) -> None:
    """They hold only moments, of float64 products."""
    accumulator, resumed = RowAccumulator(6, 2), RowAccumulator(6, 2)
    accumulator.update(torch.randn(50, 6, dtype=torch.float64), torch.randn(50, 2, dtype=torch.float64))
    accumulator.fold()
    saved = CheckpointState.of([accumulator], [], 1, 2, "0")
    CheckpointState(saved.tensors, {"counts": [saved.facts["counts"][0][:3]]}).fill([resumed])
    assert torch.equal(resumed.fold().gram(), accumulator.fold().gram())
    assert (resumed.count, resumed.fold().resolution) == (50, accumulator.fold().resolution)


def test_nothing_is_saved_before_the_interval(
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
        fit_sibling(folders, documents, file, **changes)
    assert file.exists()


def test_other_documents_are_refused(folders: dict[str, Path], documents: list[list[int]], file: Path) -> None:
    changed = [list(ids) for ids in documents]
    changed[9][50] += 1 if changed[9][50] == 0 else -1
    for others in (changed, documents[:5]):
        with pytest.raises(CheckpointMismatch, match="first 10 documents differ from those given"):
            fit_sibling(folders, others, file)


@pytest.mark.parametrize("content", [b"", b"no tensors", None])
def test_a_malformed_checkpoint_is_refused(
    folders: dict[str, Path], documents: list[list[int]], file: Path, content: bytes | None
) -> None:
    file.write_bytes(file.read_bytes()[:1000] if content is None else content)
    with pytest.raises(CheckpointMismatch, match="is not a checkpoint of a fit"):
        fit_sibling(folders, documents, file)


class ModeRecorder(Mapping[str, torch.Tensor]):
    """One tensor that records the file's mode on every access."""

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


def test_the_file_is_private_while_it_is_written(tmp_path: Path) -> None:
    left = tmp_path / "partial.new"  # of a killed run
    left.touch(mode=0o644)
    recorder = ModeRecorder(left)
    Checkpoint(tmp_path / "partial", {}, every_s=0).save(CheckpointState(recorder, {}))
    assert recorder.modes == [0o600]
    assert (tmp_path / "partial").stat().st_mode & 0o777 == 0o600


def test_a_failed_save_leaves_the_saved_state(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "partial", {"head": 4}, every_s=0)
    checkpoint.save(CheckpointState({"x": torch.ones(3)}, {"num_documents": 1}))
    with pytest.raises(ValueError, match="non contiguous"):
        checkpoint.save(CheckpointState({"x": torch.ones(3, 2).T}, {"num_documents": 2}))
    saved = checkpoint.load()
    assert saved is not None and saved.num_documents == 1
    assert [path.name for path in tmp_path.iterdir()] == ["partial"]
