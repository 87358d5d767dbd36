from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path

import uvloop

from benchmarks.gateways import __doc__ as what
from benchmarks.gateways.load import Load, Target
from benchmarks.gateways.measure import Contender, Row, Sizes, measure, soak
from benchmarks.gateways.peers import PEERS, ROOT, Peer, kvrelay_at, new_key
from benchmarks.gateways.processes import DidNotStart, Server, free_port, running
from benchmarks.gateways.stub import MODEL
from tools.measuring import commit, machine
from tools.output import add_json_option, render, write_json

ADDED = ("added p50 ms", "added p99 ms")
HEAD = ("gateway", "cpu ms", "req/s", *ADDED, "streams", "dropped", "RSS MiB", "after", "requests")


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all were measured, 1 if one did not start or a request failed."""
    asked = _arguments().parse_args(argv)
    sizes = Sizes(**{one.name: getattr(asked, one.name) for one in fields(Sizes)})
    try:
        before = [kvrelay_at(asked.before)] if asked.before else []
        rows = _measure_all([*before, *(PEERS[name] for name in asked.only or PEERS)], asked, sizes)
    except (DidNotStart, subprocess.CalledProcessError) as error:
        print(f"gateways: {error}", file=sys.stderr)
        return 1
    print(_memory_table(rows) if asked.soak else render(HEAD, [_line(row) for row in rows]))
    report = {"machine": machine(), "commit": commit(), "words": asked.words, "sizes": asdict(sizes)}
    write_json(asked.json, report | {"rows": [asdict(row) for row in rows]})
    return int(any(row.errors for row in rows))


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateways", description=what, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PEERS, metavar="GATEWAY", help=", ".join(PEERS))
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="measure this checkout of kvrelay as well")
    own = ROOT / ".kvrelay" / "peers"
    parser.add_argument(
        "--venvs", type=Path, default=own, metavar="DIR", help="folder for the other gateways' virtual environments"
    )
    parser.add_argument("--words", type=int, default=8, help="words of an answer that is not streamed")
    parser.add_argument("--soak", action="store_true", help="measure memory only, over --memory-requests")
    for one in fields(Sizes):
        kind = float if isinstance(one.default, float) else int
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=kind, default=one.default, metavar="N")
    add_json_option(parser, "the rows")
    return parser


def _measure_all(peers: list[Peer], asked: argparse.Namespace, sizes: Sizes) -> list[Row]:
    binaries = {peer.name: peer.binaries(asked.venvs) for peer in peers}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        upstream = stack.enter_context(_stub(folder)).port
        gateways = []
        for peer in peers:
            key = new_key()
            server = stack.enter_context(_running(peer, folder, upstream, key, binaries[peer.name]))
            load = Load(Target(server.port, key, MODEL), num_words=asked.words)
            gateways.append(Contender(peer.name, server, load, peer.share))
        if asked.soak:
            return uvloop.run(soak(gateways, sizes))
        alone = Load(Target(upstream, "none", MODEL), num_words=asked.words)
        return uvloop.run(measure(gateways, alone, sizes))


@contextmanager
def _stub(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.gateways.stub", str(port)]
    env = {"PYTHONPATH": str(ROOT)}
    with running(command, port=port, ready_path="/health", log=folder / "stub.log", env=env) as server:
        yield server


@contextmanager
def _running(peer: Peer, folder: Path, upstream: int, key: str, binaries: Path) -> Iterator[Server]:
    own, port = folder / peer.name, free_port()
    own.mkdir()
    start = peer.start(own, port, upstream, key, binaries)
    with running(start.command, port=port, ready_path=start.ready_path, log=own / "log", env=start.env) as server:
        yield server


def _line(row: Row) -> list[object]:
    cost, added = (row.cpu_ms, row.per_s), (row.added_p50_ms, row.added_p99_ms)
    streams, rss = (row.streams_whole, row.streams_dropped), (round(row.rss_mib[0]), round(row.rss_mib[-1]))
    return [row.gateway, *cost, *added, *streams, *rss, row.memory_requests]


def _memory_table(rows: Sequence[Row]) -> str:
    """Format the memory after each tenth of the requests."""
    lines = []
    for row in rows:
        tenth = row.memory_requests // (len(row.rss_mib) - 1)
        lines += [[row.gateway, index * tenth, f"{mib:.1f}"] for index, mib in enumerate(row.rss_mib)]
        growth = "-" if row.growth_mib is None else f"{row.growth_mib:+.2f}"
        lines.append([row.gateway, "growth per 10,000, second half", growth])
    return render(("gateway", "requests", "RSS MiB"), lines)


if __name__ == "__main__":
    sys.exit(main())
