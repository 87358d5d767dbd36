"""A plain vLLM server with the connector, as docs/vllm.md starts it: no kvrelay worker, only `kv_transfer_params`. Of
one rank, and of two by tensor parallel, each of which maps its own heads."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mappers.models import prefill
from tests.vllm.conftest import BLOCK_TOKENS
from tests.vllm.support import params, peer_of, replayed
from tests.workers.engines import tiny
from tests.workers.engines.tiny import random_tokens
from workers.api.schemas import Ticket
from workers.engines.vllm.plan import TransferReport

NUM = 6
START_S = 400  # on a busy machine
DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"

pytestmark = pytest.mark.usefixtures("installed")


def documented(bundle: Path) -> dict[str, Any]:
    """The connector's configuration as docs/vllm.md has it, with a bundle that exists."""
    found = re.search(r"--kv-transfer-config '(.*?)'", DOCS.read_text(), re.DOTALL)
    assert found is not None
    config: dict[str, Any] = json.loads(found.group(1))
    config["kv_connector_extra_config"]["bundles"] = [str(bundle)]
    return config


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def server(
    request: pytest.FixtureRequest, folder: Path, bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    arguments = ["--model", folder, "--served-model-name", "tiny", "--dtype", "float32", "--block-size", BLOCK_TOKENS]
    arguments += ["--host", "127.0.0.1", "--port", port, "--enforce-eager"]
    arguments += ["--tensor-parallel-size", request.param]
    arguments += ["--kv-transfer-config", json.dumps(documented(bundle))]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, arguments)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            _wait(client, process, log)
            yield client
    finally:
        process.terminate()
        process.wait(60)


def _wait(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    pytest.fail(f"no server after {START_S} s: {log.read_text(errors='replace')[-3000:]}")


def complete(server: httpx.Client, ids: list[int], transfer: Any = None, num: int = NUM) -> tuple[str, TransferReport]:
    body = {"model": "tiny", "prompt": ids, "max_tokens": num, "temperature": 0, "ignore_eos": True}
    reply = server.post("/v1/completions", json=body | ({"kv_transfer_params": transfer} if transfer else {}))
    assert reply.status_code == 200, reply.text
    told = reply.json()
    return told["choices"][0]["text"], TransferReport.model_validate(told.get("kv_transfer_params") or {})


def test_a_client_publishes_and_loads_through_the_openai_api(server: httpx.Client, folder: Path) -> None:
    ids = random_tokens(150, seed=3)
    native, nothing = complete(server, ids)
    assert nothing == TransferReport()
    _, published = complete(server, ids[:101], params(publish=True), num=1)
    assert isinstance(published.ticket, Ticket) and published.ticket.model == folder.name
    loaded, report = complete(server, ids, params(published.ticket))
    assert (loaded, report.loaded_tokens) == (native, 101)
    expected = tiny.greedy(tiny.reference(folder), ids, NUM)
    words = tiny.tokenizer()
    assert native.startswith(words.decode(expected[:-1], skip_special_tokens=True))


def test_a_small_models_cache_is_mapped_behind_a_native_head(
    server: httpx.Client, folder: Path, small_folder: Path, bundle: Path
) -> None:
    ids, handed, head = random_tokens(150, seed=7), 120, 4
    source, target = tiny.reference(small_folder), tiny.reference(folder)
    small = peer_of(small_folder, 2, block_tokens=20)
    ticket = small.ticket(ids[:handed], prefill(source, ids[:handed]))
    _, own = complete(server, ids[:head], params(publish=True), num=1)
    assert own.ticket is not None
    text, report = complete(server, ids, params(own.ticket, ticket))
    small.pool.close()
    assert (report.loaded_tokens, report.refused) == (handed, None)
    expected = replayed(bundle, source, target, ids, handed, head, NUM)
    assert text.startswith(tiny.tokenizer().decode(expected[:-1], skip_special_tokens=True))


@pytest.mark.parametrize("bad", [{"cache_id": 5}, {"tenant_salt": 7}, {"load": [1]}], ids=str)
def test_what_it_cannot_use_it_reports_and_goes_on(server: httpx.Client, bad: Any) -> None:
    ids = random_tokens(60, seed=5)
    text, report = complete(server, ids, bad)
    assert report.refused and not report.loaded_tokens
    assert complete(server, ids)[0] == text
