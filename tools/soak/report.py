"""The verdict of a soak: what was asked, what was broken, what was wrong; as tables, and as JSON with stable keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tools.output import render
from tools.soak.faults import Faults
from tools.soak.load import Seen
from tools.soak.samples import BOUNDS, Sample, Slope, slopes

MOST_SHOWN = 10
RECORD_S = 10.0


@dataclass
class Report:
    """Slopes are of memory in bytes, else of counts. `troubles` are processes that ended by
    themselves, and what was still there when it should not have been."""

    family: str
    seed: int
    minutes: float
    seen: Seen
    faults: Faults
    samples: Sequence[Sample] = ()
    troubles: Sequence[str] = ()
    was_stopped: bool = False

    @property
    def slopes(self) -> list[Slope]:
        return slopes(self.samples, 60 * self.minutes)

    @property
    def wrong(self) -> list[str]:
        """One line for each kind of thing that was wrong; empty if all was well."""
        counts = self.seen.counts
        lines = [
            f"{counts['wrong_answer']} wrong answers",
            f"{counts['leak_of_text']} answers with another document's canary",
            f"{counts['late']} late answers",
            f"{counts['error']} errors that nothing excuses",
        ]
        lines = [line for line in lines if not line.startswith("0 ")]
        lines += [
            f"{slope.part} leaks {slope.measure}: {_amount(slope, slope.per_hour)} an hour, bound "
            f"{_amount(slope, BOUNDS[slope.measure])}"
            for slope in self.slopes
            if slope.is_leak
        ]
        if not self.seen.num_checked and not self.was_stopped:
            lines.append("no answer was checked")
        return [*lines, *self.troubles]

    def as_json(self) -> dict[str, Any]:
        seen, counts = self.seen, self.seen.counts
        return {
            "family": self.family,
            "seed": self.seed,
            "minutes": self.minutes,
            "stopped": self.was_stopped,
            "requests": seen.num_requests,
            "checked": seen.num_checked,
            "own_canaries": seen.num_own_canaries,
            "wrong_answers": counts["wrong_answer"],
            "leaked_texts": counts["leak_of_text"],
            "late_answers": counts["late"],
            "errors": counts["error"],
            "excused_errors": dict(seen.excused),
            "slowest_s": seen.slowest_s,
            "paths": dict(seen.paths),
            "faults": dict(self.faults.counts),
            "slopes": {f"{slope.part} {slope.measure}": slope.per_minute for slope in self.slopes},
            "samples": [asdict(sample) for sample in _thinned(self.samples)],
            "troubles": list(self.troubles),
            "verdict": self.wrong,
            "findings": [asdict(finding) for finding in seen.findings],
        }

    def table(self) -> str:
        seen = self.seen
        asked = [
            ["requests", seen.num_requests],
            ["answers checked", seen.num_checked],
            *([f"  {path}", count] for path, count in sorted(seen.paths.items())),
            *([f"  excused: {what}", count] for what, count in sorted(seen.excused.items())),
            ["slowest, in s", seen.slowest_s],
            *([f"fault: {kind}", count] for kind, count in sorted(self.faults.counts.items())),
        ]
        grown = [
            [slope.part, slope.measure, _amount(slope, slope.per_hour), _amount(slope, BOUNDS[slope.measure])]
            for slope in self.slopes
        ]
        tables = [render(["what", "count"], asked), render(["part", "holds", "growth an hour", "bound"], grown)]
        shown = [f"  {one.kind} {one.request_id}: {one.what}" for one in seen.findings[:MOST_SHOWN]]
        verdict = ["", "wrong: " + "; ".join(self.wrong), *shown] if self.wrong else ["", "nothing was wrong"]
        return "\n" + "\n\n".join(tables) + "\n" + "\n".join(verdict)


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """One of each process in so many seconds."""
    return list({(one.pid, one.at_s // RECORD_S): one for one in samples}.values())


def _amount(slope: Slope, value: float) -> str:
    return f"{value / 2**20:.1f} MiB" if slope.measure == "memory" else f"{value:.1f}"
