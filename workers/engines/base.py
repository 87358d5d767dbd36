"""The interface between a worker and its engine, and the values that cross it.

    engine.admit(priority, deadline)  ─►  Claim       a slot among the running requests; every step carries it
    engine.sequence(claim, capacity)  ─►  Sequence    working memory of one request, freed when it closes
    sequence.load(ids, source)                        KV of the first tokens, copied from outside
    sequence.prefill(ids)                             KV of further tokens, computed by the model
    sequence.generate(sampling, n)    ─►  Token ...   each generated token is prefilled in turn
    sequence.fetch(begin)
    sequence.kv(begin, end)           ─►  KVCache     what is worth keeping

An engine knows tokens and KV. It knows no pool, cache id, tenant or HTTP, and no text outside its tokenizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from mappers.cache import KVCache
from mappers.fingerprint import fingerprint, tokenizer_digest
from mappers.model_config import context_of, geometry_of
from mappers.models import load_tokenizer
from workers.api.config import SettingsError
from workers.api.schemas import FormatType, KVLayout, PoolExport
from workers.engines.scheduling import Admission, Claim, Compute
from workers.engines.tokenizer import Tokenizer
from workers.rates import RateMeter
from workers.settings import WorkerSettings

MIN_LOADED_TOKENS = 16  # shorter prefixes are prefilled: nearly all prompts share their first few tokens


class KVSource(Protocol):
    """The KV of a sequence's first tokens, in a pool. It does not change until the sequence closes."""

    def __call__(self, views: KVCache, /) -> object:
        """Copy the KV into these views. Runs on the compute thread."""

    @property
    def location(self) -> PoolLocation:
        """Where the KV is stored, for an engine that copies it from another process."""


@dataclass(frozen=True)
class PoolLocation:
    """Blocks of a pool from token 0 on, and their generations."""

    pool: PoolExport
    layout: KVLayout
    blocks: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True)
class ModelInfo:
    """The model that an engine runs.

    `fingerprint` and `tokenizer_digest` are SHA-256 in hex. The latter covers the chat template, and is None without
    tokenizer files. `max_model_len` counts tokens.
    """

    name: str
    fingerprint: str
    layout: KVLayout
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    device: str
    tokenizer_digest: str | None = None


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: greedily at temperature 0, else drawn by a generator seeded with `seed`.

    `num_top` alternatives are reported with each token. `rules` is a JSON schema that constrains the output, for
    engines that support it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    num_top: int = 0
    rules: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Token:
    """A generated token. Log-probabilities are the model's own, before temperature and top_p."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenSequence(ABC):
    """The tokens of one request and their KV, in the engine's working memory."""

    token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV is in working memory."""
        return len(self.token_ids)

    @property
    @abstractmethod
    def num_loaded(self) -> int:
        """Number of tokens whose KV came from the source. An engine that cannot load all of them prefills the rest, so
        later steps may lower it, and never raise it."""

    @abstractmethod
    async def load(self, token_ids: Sequence[int], source: KVSource) -> None:
        """Copy the KV of these tokens from `source`. The sequence must be empty."""

    @abstractmethod
    async def prefill(self, token_ids: Sequence[int]) -> None:
        """Compute the KV of further tokens, attending over all earlier ones."""

    @abstractmethod
    def generate(self, sampling: Sampling, max_tokens: int) -> AsyncGenerator[Token, None]:
        """Generate up to `max_tokens` tokens after the last one prefilled, until the caller stops. The KV of the last
        generated token is not computed."""

    @abstractmethod
    async def predict(self, token_ids: Sequence[int]) -> list[int]:
        """Prefill these tokens and return the most likely next token after each of them."""

    async def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Prefill these tokens in one step and return the log-probabilities `(T, vocab)` of the next token after each,
        float32 on the CPU. Only for engines with `supports_logprobs`."""
        raise NotImplementedError("this engine does not return whole distributions")

    @abstractmethod
    def truncate(self, num_tokens: int) -> None:
        """Drop all but the first `num_tokens` tokens."""

    async def fetch(self, begin: int) -> None:  # noqa: B027 - working memory of this process needs no fetch
        """Make the KV of tokens from `begin` on available to `kv`, where it is stored in another process. Raises
        `Overloaded`, `DeadlineExceeded`, `TransferFailed` and `WorkerUnavailable`."""

    @abstractmethod
    def kv(self, begin: int, end: int) -> KVCache:
        """Return the fetched KV of tokens `[begin, end)` as views, valid until the sequence changes or closes."""


class Engine(ABC):
    """One model and the compute thread that runs it."""

    name: str
    supports_logprobs: ClassVar[bool] = False  # whether its sequences implement `logprobs`
    response_formats: ClassVar[tuple[FormatType, ...]] = ("text",)  # all but text need `Sampling.rules`
    model: ModelInfo
    tokenizer: Tokenizer
    compute: Compute
    admission: Admission
    rates: RateMeter

    def admit(self, *, priority: int = 0, deadline: float | None = None) -> AbstractAsyncContextManager[Claim]:
        """Wait for a slot. `deadline` is an instant of `time.monotonic()`. Raises `Overloaded`, `DeadlineExceeded`."""
        return self.admission.admit(priority=priority, deadline=deadline)

    @abstractmethod
    def sequence(self, claim: Claim, capacity: int) -> AbstractAsyncContextManager[TokenSequence]:
        """Allocate working memory for one request of about `capacity` tokens."""

    async def warm_up(self) -> None:  # noqa: B027 - most engines need none
        """Do what would make the first request slow. Raises what a request may raise."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop after the running step and free the memory."""


def describe_model(
    settings: WorkerSettings, folder: Path, config: Any, generation_config: Any
) -> tuple[ModelInfo, Tokenizer]:
    """Read what a worker needs to know of a model from its files. Raises `MapperError` if the model's KV is of an
    unsupported kind, `SettingsError` if its context is too short."""
    geometry, num_positions = geometry_of(config), context_of(config)
    if settings.max_model_len is not None and settings.max_model_len > num_positions:
        raise SettingsError(
            f"worker {settings.id!r}: max_model_len is {settings.max_model_len}, but {settings.model!r} has only "
            f"{num_positions} positions"
        )
    info = ModelInfo(
        name=settings.model_name,
        fingerprint=fingerprint(folder),
        layout=KVLayout(
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            block_tokens=settings.block_tokens,
            dtype=settings.dtype,
        ),
        max_model_len=settings.max_model_len or num_positions,
        vocab_size=config.vocab_size,
        eos_ids=_eos_ids(generation_config, config),
        device=settings.device,
        tokenizer_digest=tokenizer_digest(folder),
    )
    tokenizer = Tokenizer(
        load_tokenizer(folder), model=info.name, vocab_size=info.vocab_size, max_tokens=info.max_model_len
    )
    return info, tokenizer


def _eos_ids(*configs: Any) -> frozenset[int]:
    """Return the end tokens of the first config that has any: the generation config's before the model's."""
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
