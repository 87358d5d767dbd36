"""A plain vLLM server with the connector, as docs/vllm.md starts it: no kvrelay worker, only `kv_transfer_params`. It
runs with one rank, and with two tensor-parallel ranks that map their own heads."""

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
from tests.vllm.support import params, peer_of, replay_answer
from tests.workers.engines import tiny
from tests.workers.engines.tiny import random_tokens
from workers.api.schemas import Ticket
from workers.engines.vllm.plan import TransferReport

NUM = 6
START_S = 400  # on a busy machine
DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"

pytestmark = pytest.mark.usefixtures("installed")


def documented_config(bundle: Path) -> dict[str, Any]:
    """The connector's configuration from docs/vllm.md, with an existing bundle."""
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
    arguments += ["--kv-transfer-config", json.dumps(documented_config(bundle))]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, arguments)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            _wait_until_ready(client, process, log)
            yield client
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
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
    body = reply.json()
    return body["choices"][0]["text"], TransferReport.model_validate(body.get("kv_transfer_params") or {})


def test_client_publishes_and_loads_through_the_openai_api(server: httpx.Client, folder: Path) -> None:
    ids = random_tokens(150, seed=3)
    native, empty = complete(server, ids)
    assert empty == TransferReport()
    _, published = complete(server, ids[:101], params(publish=True), num=1)
    assert isinstance(published.ticket, Ticket) and published.ticket.model == folder.name
    loaded, report = complete(server, ids, params(published.ticket))
    assert (loaded, report.loaded_tokens) == (native, 101)
    expected = tiny.greedy(tiny.reference(folder), ids, NUM)
    tokenizer = tiny.tokenizer()
    assert native.startswith(tokenizer.decode(expected[:-1], skip_special_tokens=True))


def test_small_models_cache_is_mapped_after_a_native_head(
    server: httpx.Client, folder: Path, small_folder: Path, bundle: Path
) -> None:
    ids, handed, head = random_tokens(150, seed=7), 120, 4
    source, target = tiny.reference(small_folder), tiny.reference(folder)
    small = peer_of(small_folder, 2, block_tokens=20)
    ticket = small.ticket(ids[:handed], prefill(source, ids[:handed]))
    _, published = complete(server, ids[:head], params(publish=True), num=1)
    assert published.ticket is not None
    text, report = complete(server, ids, params(published.ticket, ticket))
    small.pool.close()
    assert (report.loaded_tokens, report.refused) == (handed, None)
    expected = replay_answer(bundle, source, target, ids, handed, head, NUM)
    assert text.startswith(tiny.tokenizer().decode(expected[:-1], skip_special_tokens=True))


@pytest.mark.parametrize("bad", [{"cache_id": 5}, {"tenant_salt": 7}, {"load": [1]}], ids=str)
def test_bad_parameters_are_reported_and_answered(server: httpx.Client, bad: Any) -> None:
    ids = random_tokens(60, seed=5)
    text, report = complete(server, ids, bad)
    assert report.refused and not report.loaded_tokens
    assert complete(server, ids)[0] == text
