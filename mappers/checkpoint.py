"""Statistics of a fit on disk, so that an interrupted fit resumes.

One file, replaced atomically: it holds the old state or the new one, never a mixture.
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

from mappers.errors import CheckpointMismatch, MapperError
from mappers.stats import Moments, RowAccumulator

PARTS = ("mean_x", "mean_y", "xx", "xy", "yy")
COUNTS = ("count", "mass", "squares", "resolution")  # older files lack the last one; their products are float64
ROWS = ("x", "y", "weights")


@dataclass(frozen=True)
class CheckpointState:
    """State of a collector after `num_documents` documents. `digest` is SHA-256 over their token ids."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        accumulators: Sequence[RowAccumulator],
        copies: Sequence[Any],
        num_documents: int,
        num_tokens: int,
        digest: str,
    ) -> CheckpointState:
        moments = {i: each.moments for i, each in enumerate(accumulators) if each.moments is not None}
        batches = {(i, j): batch for i, each in enumerate(accumulators) for j, batch in enumerate(each.batches)}
        tensors = {f"{i}.{part}": getattr(moment, part) for i, moment in moments.items() for part in PARTS}
        for (i, j), batch in batches.items():
            tensors |= {f"{i}.{j}.{name}": part for name, part in zip(ROWS, batch.parts, strict=True)}
        facts = {
            "counts": [[getattr(each.moments, name) for name in COUNTS if each.moments] for each in accumulators],
            "batches": [len(each.batches) for each in accumulators],
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

    def fill(self, accumulators: Sequence[RowAccumulator]) -> None:
        """Restore the rows and moments into empty accumulators of the same shapes."""
        num_batches = self.facts.get("batches", [0] * len(accumulators))  # older files hold moments only
        for index, (each, counts, num) in enumerate(zip(accumulators, self.facts["counts"], num_batches, strict=True)):
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
        """Raise `CheckpointMismatch` unless `digest` is that of the documents in this state."""
        if digest != self.digest:
            raise CheckpointMismatch(f"the checkpoint's first {self.num_documents} documents differ from those given")


class _TensorsOnDisk(Mapping[str, Tensor]):
    """Tensors of a file, each loaded on access: all at once would double the memory of what they are copied into."""

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
    """A file with a fit's statistics and the rows not yet folded into them; readable by its owner only.

    With `keep` it is saved up to the last document. `settings` identify the fit; a file of others is refused.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], every_s: float, keep: bool = False):
        self.path, self.keep, self._every_s = Path(path), keep, every_s
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._saved_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._saved_at >= self._every_s

    @property
    def is_due_at_end(self) -> bool:
        """Whether to save after the last document: the choice of layers may be interrupted too."""
        return self.keep or time.monotonic() - self._saved_at >= self._every_s / 10

    def load(self) -> CheckpointState | None:
        """Return the stored state, None without a file. Raises `CheckpointMismatch`."""
        if not self.path.exists():
            return None
        try:
            with safetensors.safe_open(self.path, "pt") as file:
                facts = json.loads(file.metadata()["kvrelay"])
                self._check(facts["settings"])
                return CheckpointState(_TensorsOnDisk(self.path, list(file.keys())), facts)
        except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, CheckpointMismatch):
                raise
            raise CheckpointMismatch(f"{self.path} is not a checkpoint of a fit; remove it or use another") from error

    def save(self, state: CheckpointState) -> None:
        """Replace the file. Raises `MapperError` if it cannot be written; then the old state remains."""
        try:
            self._replace(state)
        except (safetensors.SafetensorError, OSError) as error:
            raise MapperError(f"cannot write {self.path}: {error}") from error
        self._saved_at = time.monotonic()

    def _replace(self, state: CheckpointState) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        facts = json.dumps({"settings": self._settings, **state.facts})
        scratch = self.path.with_name(f"{self.path.name}.new")  # a fixed name: a kill leaves one file at most
        scratch.unlink(missing_ok=True)
        try:
            scratch.touch(mode=0o600, exist_ok=False)  # before the content: cache rows are user data
            save_file(dict(state.tensors), scratch, {"kvrelay": facts})
            scratch.replace(self.path)
        finally:
            scratch.unlink(missing_ok=True)

    def _check(self, stored: Mapping[str, Any]) -> None:
        for name in sorted(self._settings.keys() | stored.keys()):
            if self._settings.get(name) != stored.get(name):
                raise CheckpointMismatch(
                    f"{self.path} was written with {name} {stored.get(name)!r}, not {self._settings.get(name)!r}; "
                    f"use the same settings or remove it"
                )
