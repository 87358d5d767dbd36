"""What `kvrelay fit` is about to read: all of it as token ids, so that what is wrong with it shows before a model is
loaded, and how far the reading has come is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mappers.cache import KVGeometry
from mappers.collect import Reading, longest_of, planned_bytes, rows_to_fit, usable
from mappers.commands.pair import Pair
from mappers.errors import CalibrationTooSmall
from mappers.fingerprint import read_config
from mappers.fit import Layers, check_enough
from mappers.methods import Method
from mappers.models import geometry_of, local_folder
from mappers.rotary import config_of


@dataclass(frozen=True)
class Planned:
    """Documents for two models to read, and the memory that statistics of them take at most."""

    documents: list[list[int]]
    geometries: tuple[KVGeometry, KVGeometry]
    statistics_bytes: int

    @classmethod
    def of(cls, pair: Pair, method: Method, layers: Layers, reading: Reading, num_tokens: int) -> Planned:
        """The first documents of the calibration split, of so many tokens if there are as many.

        Raises `CalibrationTooSmall` for fewer than `method` needs to map this pair, `DataUnreadable` for none.
        """
        documents = pair.documents("calibrate")  # whose first is read by now: there may be much to fetch
        configs = [read_config(local_folder(name)) for name in (pair.source, pair.target)]
        source, target = map(geometry_of, configs)
        read = usable(documents, reading.head, longest_of(map(config_of, configs)))
        found = list(_first(read, num_tokens))
        if not found:
            raise CalibrationTooSmall(f"no document of {pair.corpus} has more than {reading.head + 1} tokens")
        check_enough(rows_to_fit(map(len, found), reading), method, (source, target), layers, reading)
        needed = planned_bytes(source, target, reading, configs[1].get("hidden_size", 0), _count(found))
        return cls(found, (source, target), needed)

    @property
    def num_tokens(self) -> int:
        return _count(self.documents)

    def told(self, num_asked: int) -> str:
        """What is about to happen, if so many tokens were asked for."""
        source, target = self.geometries
        enough = "" if self.num_tokens >= num_asked else f", all that there are of the {num_asked} asked for"
        return (
            f"{self.num_tokens} tokens in {len(self.documents)} documents{enough}\n"
            f"{source.num_layers} layers of {source.num_kv_heads} x {source.head_dim} onto {target.num_layers} of "
            f"{target.num_kv_heads} x {target.head_dim}; statistics take at most {self.statistics_bytes / 1e9:.1f} GB "
            f"beside the models"
        )


def _first(documents: Iterable[list[int]], num_tokens: int) -> Iterator[list[int]]:
    for ids in documents:
        yield ids
        num_tokens -= len(ids)
        if num_tokens <= 0:
            return


def _count(documents: Sequence[Sequence[int]]) -> int:
    return sum(map(len, documents))
