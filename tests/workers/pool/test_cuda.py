from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.pool.support import LAYOUT, make_arena, random_kv
from tests.workers.transports.owner import RemoteOwner
from workers.pool import create_arena, new_epoch
from workers.pool.blocks import block_bytes, copy_in
from workers.pool.cuda import CudaArena, CudaError, CudaRuntime
from workers.pool.segment import Segment
from workers.transports import load_transport

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@without_gpu
def test_without_gpu_pool_is_rejected_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(CudaError, match="finds no CUDA device; use a pool of kind shm"):
        make_arena("cuda_ipc", tmp_path)
    assert not list(tmp_path.iterdir())


@without_gpu
def test_without_gpu_transport_is_rejected() -> None:
    with pytest.raises(CudaError, match="no CUDA device"):
        load_transport("cuda_ipc")


@pytest.mark.gpu
def test_blocks_have_their_own_allocation(tmp_path: Path) -> None:
    """A handle to memory of PyTorch's allocator would share its neighbours too."""
    before = torch.cuda.memory_allocated()
    arena = make_arena("cuda_ipc", tmp_path)
    assert isinstance(arena, CudaArena)
    assert torch.cuda.memory_allocated() == before
    assert arena.data.is_cuda and arena.data.untyped_storage().nbytes() == 16 * block_bytes(LAYOUT)
    arena.close()


@pytest.mark.gpu
def test_blocks_are_on_the_given_device(tmp_path: Path) -> None:
    for device in range(torch.cuda.device_count()):
        arena = create_arena(
            "cuda_ipc", LAYOUT, 16 * block_bytes(LAYOUT), worker="w", epoch=new_epoch(), directory=tmp_path,
            device=f"cuda:{device}",
        )  # fmt: skip
        assert arena.data.device == torch.device("cuda", device)
        assert arena.export().address["gpu"] == CudaRuntime().pci_bus_id(device)
        arena.close()


@pytest.mark.gpu
def test_generations_are_in_host_file_without_blocks(tmp_path: Path) -> None:
    arena = make_arena("cuda_ipc", tmp_path)
    segment = Segment.attach(str(arena.export().address["name"]), tmp_path)
    with arena.writing([3]):
        assert segment.generations[3] == 1
    assert segment.generations[3] == 2 and segment.header.block_bytes == 0
    segment.close()
    arena.close()


@pytest.mark.gpu
def test_write_ends_on_device_before_generation_is_even(tmp_path: Path) -> None:
    arena = make_arena("cuda_ipc", tmp_path)
    done = torch.cuda.Event()
    with arena.writing([0, 1]):
        copy_in(arena.data, [0, 1], random_kv(0, 8))
        torch.cuda._sleep(50_000_000)
        done.record()
    assert done.query()
    arena.close()


@pytest.mark.gpu
def test_close_frees_memory(tmp_path: Path) -> None:
    layout = LAYOUT.model_copy(update={"num_layers": 1024, "block_tokens": 1024})  # 128 MiB per block
    free_before, _ = torch.cuda.mem_get_info()
    arena = make_arena("cuda_ipc", tmp_path, num_blocks=4, layout=layout)
    taken = free_before - torch.cuda.mem_get_info()[0]
    assert taken >= 4 * block_bytes(layout)
    arena.close()
    assert torch.cuda.mem_get_info()[0] >= free_before - taken // 4


@pytest.mark.gpu
def test_reader_close_frees_memory_of_killed_owner() -> None:
    layout = LAYOUT.model_copy(update={"num_layers": 1024, "block_tokens": 1024})
    owner = RemoteOwner("cuda_ipc", num_blocks=4, layout=layout)
    ticket = owner.ticket(8)
    reader = load_transport("cuda_ipc").open(ticket.pool, ticket.layout)
    owner.kill()
    assert not reader.alive()
    held, _ = torch.cuda.mem_get_info()
    reader.close()
    assert torch.cuda.mem_get_info()[0] >= held + 3 * block_bytes(layout)


@pytest.mark.gpu
def test_device_is_found_by_bus_id() -> None:
    runtime = CudaRuntime()
    for device in range(torch.cuda.device_count()):
        assert runtime.device_at(runtime.pci_bus_id(device)) == device


@pytest.mark.gpu
def test_failed_call_reports_error_and_clears_it() -> None:
    runtime = CudaRuntime()
    with pytest.raises(CudaError, match="cudaMalloc failed: out of memory"):
        runtime.malloc(1 << 50)
    assert torch.zeros(1, device="cuda").item() == 0
