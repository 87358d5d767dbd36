"""`KvrelayConnector`: both sides behind vLLM's `KVConnectorBase_V1`, one in its scheduler and one in every worker.

vLLM loads it with

    --kv-transfer-config '{"kv_connector": "KvrelayConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "workers.engines.vllm.connector",
                           "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"bundles": ["bundles/smol"]}}'

Loading is synchronous: it ends before the forward pass of the step that needs it. Tested with vLLM 0.32.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.request import RequestStatus

from workers.engines.vllm.config import ConnectorSettings, EngineModel
from workers.engines.vllm.paged import CpuLayout, CudaLayout, PagedLayout, head_range
from workers.engines.vllm.plan import StepWork
from workers.engines.vllm.scheduler import SchedulerSide
from workers.engines.vllm.worker import PagedCache, WorkerSide

WHOLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    work: StepWork = field(default_factory=StepWork)


@dataclass
class SavedMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The step's saves, and whether each succeeded: on all workers, once their results are aggregated."""

    saved: dict[str, bool]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        both = self.saved.keys() | other.saved.keys()
        return SavedMetadata({key: self.saved.get(key, True) and other.saved.get(key, True) for key in both})


class KvrelayConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Raises `SettingsError` at start if it cannot serve the settings or the model."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        settings.follow_parent(is_worker=role == KVConnectorRole.WORKER)
        self._model = EngineModel.of(vllm_config, settings)
        self._model.check(kv_cache_config, self._kv_transfer_config.kv_load_failure_policy)
        self._settings = settings
        self._scheduler = self._model.scheduler_side(settings) if role == KVConnectorRole.SCHEDULER else None
        self._worker: WorkerSide | None = None

    @property
    def scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM calls this on the scheduler's connector only"
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        assert self._worker is not None, "vLLM registers its caches before it runs a step"
        return self._worker

    # -- in the scheduler -------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        salt = self.scheduler.add_request(request)
        if salt is not None:
            _cache_under(request, salt)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self.scheduler.num_loadable(request.request_id, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.blocks_assigned(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        state = scheduler_output.kv_connector_block_state
        return StepMetadata(
            self.scheduler.plan_step(
                scheduler_output.num_scheduled_tokens,
                lambda request_id: state.get_block_ids(request_id)[0],
            )
        )

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        saved = metadata.saved if isinstance(metadata, SavedMetadata) else {}
        failed = connector_output.invalid_block_ids or set()
        self._kv_cache_manager.evict_blocks(failed)
        for request in self.scheduler.end_step(failed, saved):
            _cache_under(request, secrets.token_hex(32))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler.finish(request.request_id, is_whole=request.status in WHOLE)

    # -- in a worker ------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        layers = self._model.in_order(kv_caches)
        first = self._vllm_config.compilation_config.static_forward_context[next(iter(kv_caches))]
        num_ranks = self._vllm_config.parallel_config.tensor_parallel_size
        rank = get_tensor_model_parallel_rank() if num_ranks > 1 else 0
        heads = head_range(rank, num_ranks, self._model.layout.num_kv_heads)
        cache = PagedCache(layers, self._paged_layout(layers[0], first), heads)
        self._worker = self._model.worker_side(self._settings, cache)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.load(self._get_connector_metadata().work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers are loaded before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: published KV is read from the paged cache after the step."""

    def wait_for_save(self) -> None:
        self.worker.save(self._get_connector_metadata().work)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> SavedMetadata | None:
        saved = self.worker.take_saved()
        return SavedMetadata(saved) if saved else None

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    def _paged_layout(self, layer: Tensor, module: Any) -> PagedLayout:
        if layer.device.type != "cpu":
            return CudaLayout()
        return CpuLayout(partial(_write_rows, module), layer.shape[2], layer.shape[3] // 2, layer.dtype)


def _cache_under(request: Any, salt: str) -> None:
    """Make vLLM cache this request's further blocks under that salt."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()


def _write_rows(
    module: Any, keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Call vLLM's op as its attention layer does. `module.isa` names the processor's packing. It is set only when the
    layer is about to run."""
    with torch.no_grad():
        _custom_ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, module.isa)
