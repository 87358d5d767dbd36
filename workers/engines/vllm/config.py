"""The connector's settings (`kv_connector_extra_config`), and what it needs to know of vLLM's model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError
from torch import Tensor

from mappers.errors import MapperError
from mappers.fingerprint import fingerprint, tokenizer_digest
from mappers.model_config import geometry_of
from mappers.models import local_folder
from workers.api.config import SettingsError
from workers.api.errors import KvrelayError
from workers.api.process import ParentWatchError, die_with_parent
from workers.api.schemas import KVLayout
from workers.bundles import Bundles, load_bundles
from workers.engines.vllm.plan import LoadTarget
from workers.engines.vllm.scheduler import SchedulerSide, create_exchange
from workers.engines.vllm.worker import PagedCache, WorkerSide
from workers.settings import GateSettings, first_problem

_LAYER = re.compile(r"\.(\d+)\.")


class ConnectorSettings(BaseModel):
    """`name` is part of the exchange's file name. `model` is this model's name in tickets. `transports` are those that
    a step may wait for. `parent` is the process whose end also ends vLLM's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(default="vllm", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    model: str | None = None
    bundles: list[str] = []
    gate: GateSettings = GateSettings()
    exchange_bytes: ByteSize = Field(default=ByteSize(256 * 2**20), gt=0)
    block_tokens: int = Field(default=32, ge=1, le=1024)
    transports: list[str] = ["inproc", "shm", "cuda_ipc"]
    parent: int | None = None

    @staticmethod
    def of(extra_config: Mapping[str, Any]) -> ConnectorSettings:
        try:
            return ConnectorSettings.model_validate(dict(extra_config))
        except ValidationError as error:
            raise SettingsError(f"kv_connector_extra_config: {first_problem(error)}") from error

    def follow_parent(self, *, is_worker: bool) -> None:
        """End this process with its parent. A vLLM worker follows the process that started it, which is either `parent`
        or follows it in turn. Raises `SettingsError` if the parent has already ended."""
        if self.parent is not None:
            try:
                die_with_parent(0 if is_worker else self.parent)
            except ParentWatchError as error:
                raise SettingsError(str(error)) from error


@dataclass(frozen=True)
class EngineModel:
    """vLLM's model in kvrelay's terms. `layout` is the exchange's: it has all heads, whatever a worker holds."""

    folder: Path
    name: str
    fingerprint: str
    layout: KVLayout
    max_model_len: int
    paged_block_tokens: int
    paged_dtype: str
    device: str
    schedules_ahead: bool = False

    @staticmethod
    def of(vllm_config: Any, settings: ConnectorSettings) -> EngineModel:
        model = vllm_config.model_config
        try:
            folder = local_folder(model.model)
            geometry = geometry_of(model.hf_config)
            return EngineModel(
                folder=folder,
                name=settings.model or folder.name,
                fingerprint=fingerprint(folder),
                layout=KVLayout(
                    num_layers=geometry.num_layers,
                    num_kv_heads=geometry.num_kv_heads,
                    head_dim=geometry.head_dim,
                    block_tokens=settings.block_tokens,
                    dtype=str(model.dtype).removeprefix("torch."),
                ),
                max_model_len=model.max_model_len,
                paged_block_tokens=vllm_config.cache_config.block_size,
                paged_dtype=str(vllm_config.cache_config.cache_dtype),
                device=str(vllm_config.device_config.device_type),
                schedules_ahead=bool(vllm_config.scheduler_config.async_scheduling),
            )
        except (MapperError, KvrelayError) as error:
            raise SettingsError(f"kvrelay's connector cannot serve {model.model!r}: {error}") from error

    def check(self, kv_cache_config: Any, load_failure_policy: str) -> None:
        """Raise `SettingsError` if the connector cannot serve this configuration."""
        if load_failure_policy != "recompute":
            raise SettingsError(
                f"kv_load_failure_policy is {load_failure_policy!r}; it must be 'recompute': otherwise a source that "
                "cannot be read fails the request"
            )
        if self.schedules_ahead:
            raise SettingsError(
                "async scheduling is on; turn it off (--no-async-scheduling): it would put into the answer what a step "
                "has computed over a source that could not be read"
            )
        if self.paged_dtype not in ("auto", self.layout.dtype):
            raise SettingsError(f"vLLM stores KV as {self.paged_dtype}; kvrelay supports {self.layout.dtype} only")
        if reason := unsupported_reason(kv_cache_config):
            raise SettingsError(f"kvrelay's connector cannot serve {self.name}: {reason}")

    def in_order(self, kv_caches: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return vLLM's layers in the model's order."""
        by_number = {layer_number(name): cache for name, cache in kv_caches.items()}
        if sorted(by_number) != list(range(self.layout.num_layers)):
            raise SettingsError(
                f"vLLM has KV of layers {sorted(by_number)}; {self.name} has {self.layout.num_layers} layers"
            )
        return tuple(by_number[number] for number in sorted(by_number))

    def scheduler_side(self, settings: ConnectorSettings) -> SchedulerSide:
        try:
            exchange = create_exchange(settings.name, self.layout, settings.exchange_bytes, self.fingerprint)
        except KvrelayError as error:
            raise SettingsError(f"kvrelay's connector: {error.message}") from error
        target = LoadTarget(exchange, self._bundles(settings).usable, settings.transports, self.max_model_len)
        return SchedulerSide(target, self.name, self.paged_block_tokens)

    def worker_side(self, settings: ConnectorSettings, cache: PagedCache) -> WorkerSide:
        return WorkerSide(cache, self._bundles(settings).usable(), self.layout)

    def _bundles(self, settings: ConnectorSettings) -> Bundles:
        return load_bundles(
            settings.bundles,
            target_fingerprint=self.fingerprint,
            target_tokenizer=tokenizer_digest(self.folder),
            gate=settings.gate,
            device=self.device,
        )


def unsupported_reason(kv_cache_config: Any) -> str | None:
    """Return why KV of this layout cannot be loaded and saved, None if it can."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"its layers form {len(groups)} KV groups (hybrid); a ticket holds one kind of KV for all layers"
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if getattr(spec, "sliding_window", None) is not None or "SlidingWindow" in kind:
        return f"its layers have a sliding window ({kind}); vLLM drops KV that a ticket holds"
    if kind != "FullAttentionSpec":
        return f"its KV is {kind}; keys and values of full attention are needed"
    return None


def layer_number(name: str) -> int:
    """Return the number in a name like `model.layers.7.self_attn.attn`."""
    found = _LAYER.search(name)
    if found is None:
        raise SettingsError(f"vLLM's layer {name!r} has no number in its name")
    return int(found.group(1))
