"""The statistics of a fit on disk, so that one that was killed goes on where it stood.

One file, replaced as a whole: it is the old state or the new one, never a part of one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save_file
from torch import Tensor

from mappers.copies import CopyFinder
from mappers.errors import CheckpointMismatch, MapperError
from mappers.stats import Moments, RowAccumulator

EVERY_S = 300.0
PARTS = ("mean_x", "mean_y", "xx", "xy", "yy")
COUNTS = ("count", "mass", "squares", "resolution")  # older files lack the last: theirs are float64 products
ROWS = ("x", "y", "weights")


@dataclass(frozen=True)
class CheckpointState:
    """What a collector knows after `num_documents` documents, whose token ids have the SHA-256 `digest`."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    @classmethod
    def of(
        cls, gathered: Sequence[RowAccumulator], finder: CopyFinder, num_documents: int, num_tokens: int, digest: str
    ) -> CheckpointState:
        moments = {i: each.moments for i, each in enumerate(gathered) if each.moments is not None}
        batches = {(i, j): batch for i, each in enumerate(gathered) for j, batch in enumerate(each.batches)}
        tensors = {f"{i}.{part}": getattr(moment, part) for i, moment in moments.items() for part in PARTS}
        for (i, j), batch in batches.items():
            tensors |= {f"{i}.{j}.{name}": part for name, part in zip(ROWS, batch.parts, strict=True)}
        copies = [
            (kind, layer, source, finder.lost[kind, layer], finder.power[kind, layer])
            for (kind, layer), source in finder.copies.items()
        ]
        facts = {
            "counts": [[getattr(each.moments, name) for name in COUNTS if each.moments] for each in gathered],
            "batches": [len(each.batches) for each in gathered],
            "copies": copies,
            "num_documents": num_documents,
            "num_tokens": num_tokens,
            "digest": digest,
        }
        return cls(tensors, facts)

    @property
    def num_documents(self) -> int:
        return int(self.facts["num_documents"])

    @property
    def num_tokens(self) -> int:
        return int(self.facts["num_tokens"])

    @property
    def digest(self) -> str:
        return str(self.facts["digest"])

    def finder(self) -> CopyFinder:
        finder = CopyFinder({(kind, layer): source for kind, layer, source, _, _ in self.facts["copies"]})
        for kind, layer, _, lost, power in self.facts["copies"]:
            finder.lost[kind, layer], finder.power[kind, layer] = lost, power
        return finder

    def fill(self, gathered: Sequence[RowAccumulator]) -> None:
        """Put what was gathered back into empty ones of the same shapes."""
        num_batches = self.facts.get("batches", [0] * len(gathered))  # older files hold moments alone
        for index, (each, counts, num) in enumerate(zip(gathered, self.facts["counts"], num_batches, strict=True)):
            if counts:
                self._fill_moments(each.fold(), index, counts)
            for batch in range(num):
                each.update(*(self.tensors[f"{index}.{batch}.{part}"] for part in ROWS))

    def _fill_moments(self, moments: Moments, index: int, counts: Sequence[float]) -> None:
        for part in PARTS:
            getattr(moments, part).copy_(self.tensors[f"{index}.{part}"])
        for name, value in zip(COUNTS, counts, strict=False):
            setattr(moments, name, value)
        moments.changed()

    def check_documents(self, digest: str) -> None:
        """Raise `CheckpointMismatch` unless these are the documents that were read."""
        if digest != self.digest:
            raise CheckpointMismatch(f"the checkpoint's first {self.num_documents} documents are others than these")


class _OnDisk(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is asked for: all of them would be as much as what they are put into."""

    def __init__(self, path: Path, names: Sequence[str]):
        self._path, self._names = path, names

    def __getitem__(self, name: str) -> Tensor:
        with safetensors.safe_open(self._path, "pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Checkpoint:
    """A file that holds a fit's statistics and the rows that are not yet part of them, to the last document if it is to
    be kept (`keep`); readable by its owner alone.

    `settings` are those of the fit: a file of other ones is refused.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], every_s: float = EVERY_S, keep: bool = False):
        self.path, self.keep, self._every_s = Path(path), keep, every_s
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._saved_at = time.monotonic()

    @property
    def due(self) -> bool:
        return time.monotonic() - self._saved_at >= self._every_s

    @property
    def is_due_at_end(self) -> bool:
        """Whether all has been read, and much of it since the last time: the choice of layers may yet be broken off."""
        return self.keep or time.monotonic() - self._saved_at >= self._every_s / 10

    def load(self) -> CheckpointState | None:
        """What the file holds; None if there is none. Raises `CheckpointMismatch`."""
        if not self.path.exists():
            return None
        try:
            with safetensors.safe_open(self.path, "pt") as file:
                facts = json.loads(file.metadata()["kvrelay"])
                self._check(facts["settings"])
                return CheckpointState(_OnDisk(self.path, list(file.keys())), facts)
        except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, CheckpointMismatch):
                raise
            raise CheckpointMismatch(f"{self.path} is no checkpoint of a fit; remove it, or name another") from error

    def save(self, saved: CheckpointState) -> None:
        """Replace what the file holds. Raises `MapperError` if it can't be written: then it holds what it held."""
        try:
            self._replace(saved)
        except (safetensors.SafetensorError, OSError) as error:
            raise MapperError(f"cannot write {self.path}: {error}") from error
        self._saved_at = time.monotonic()

    def _replace(self, saved: CheckpointState) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        facts = json.dumps({"settings": self._settings, **saved.facts})
        scratch = self.path.with_name(f"{self.path.name}.new")  # one name: a kill leaves one file at most
        scratch.unlink(missing_ok=True)
        try:
            scratch.touch(mode=0o600, exist_ok=False)  # rows of a cache tell what was read: nobody else may ever look
            save_file(dict(saved.tensors), scratch, {"kvrelay": facts})
            scratch.replace(self.path)
        finally:
            scratch.unlink(missing_ok=True)

    def _check(self, theirs: Mapping[str, Any]) -> None:
        for name in sorted(self._settings.keys() | theirs.keys()):
            if self._settings.get(name) != theirs.get(name):
                raise CheckpointMismatch(
                    f"{self.path} was begun with {name} {theirs.get(name)!r}, not {self._settings.get(name)!r}; "
                    f"go on with the same settings, or remove it"
                )
