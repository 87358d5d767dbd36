"""What the worker asks of an engine, and the values that travel between them.

    engine.admit(priority, deadline)  ─►  Claim       a place in the queue; every step of the work carries it
    engine.sequence(claim, capacity)  ─►  Sequence    working memory of one request, freed when it closes
    sequence.load(source, n)                          KV of the first n tokens, supplied from outside
    sequence.read(token_ids)                          KV of further tokens, computed natively
    sequence.generate(sampling, n)    ─►  Token ...   each written token is read in turn
    sequence.fetch(begin)
    sequence.kv(begin, end)           ─►  KVCache     what is worth keeping

An engine knows tokens and KV. It knows no pool, no cache id, no tenant, no HTTP, and no text but its tokenizer's.

What a worker must know of a model that it serves, from the model's files: the same for every engine."""

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
from workers.api.config import SettingsError
from workers.api.schemas import FormatType, KVLayout, PoolExport
from workers.engines.scheduling import Admission, Claim, Compute
from workers.engines.tokenizer import Tokenizer
from workers.rates import RateMeter
from workers.settings import WorkerSettings

MIN_LOADED_TOKENS = 16  # fewer are read: nearly all prompts share their first few tokens


class KVSource(Protocol):
    """The KV of a sequence's first tokens, which stands in a pool and stays as it is until the sequence closes."""

    def __call__(self, views: KVCache, /) -> object:
        """Copy it into these views. Runs on the compute thread."""

    @property
    def place(self) -> PoolLocation:
        """Where it stands, for an engine that copies it itself, in another process."""


@dataclass(frozen=True)
class PoolLocation:
    """Blocks of a pool, from token 0 on, and their generations."""

    pool: PoolExport
    layout: KVLayout
    blocks: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True)
class ModelInfo:
    """The model that an engine runs. `fingerprint` and `tokenizer_digest` (chat template included; None if there is no
    file to tell) are SHA-256 in hex, `max_model_len` counts tokens."""

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
    """How the next token is chosen: greedily at temperature 0, else drawn by a generator of this `seed`.

    `num_top` alternatives are reported with each token. What is written follows the JSON schema `rules`, where the
    engine has that.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    num_top: int = 0
    rules: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Token:
    """One written token. Log-probabilities are those of the model, before temperature and top_p."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenSequence(ABC):
    """The tokens of one request and their KV, in the engine's working memory."""

    token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV stands in working memory."""
        return len(self.token_ids)

    @property
    @abstractmethod
    def num_loaded(self) -> int:
        """Tokens whose KV came from the source. After a `read` these are those that really did: an engine that could
        not load all has read the rest. Later ones may make them fewer, never more."""

    @abstractmethod
    async def load(self, token_ids: Sequence[int], source: KVSource) -> None:
        """Take the KV of these tokens from `source`. The sequence must be empty."""

    @abstractmethod
    async def read(self, token_ids: Sequence[int]) -> None:
        """Compute the KV of further tokens, attending over all that stands before them."""

    @abstractmethod
    def generate(self, sampling: Sampling, max_tokens: int) -> AsyncGenerator[Token, None]:
        """Write up to `max_tokens` tokens after the last one read. The caller stops when it has enough; the last token
        written has not been read."""

    @abstractmethod
    async def predict(self, token_ids: Sequence[int]) -> list[int]:
        """Read these tokens; the most likely next token after each of them."""

    async def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Read these tokens, all in one step; log-probabilities `(T, vocab)`, float32 on the CPU, of the next token
        after each of them. Only for an engine that `tells_distributions`."""
        raise NotImplementedError("this engine tells no whole distributions")

    @abstractmethod
    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens."""

    async def fetch(self, begin: int) -> None:  # noqa: B027 - working memory of this process is within reach
        """Bring the KV of tokens from `begin` on within reach of `kv`, where it stands in another process. Raises
        `Overloaded`, `DeadlineExceeded`, `TransferFailed`, `WorkerUnavailable`, as a request there may."""

    @abstractmethod
    def kv(self, begin: int, end: int) -> KVCache:
        """KV of tokens `[begin, end)`, which was fetched, as views: good until the sequence goes on or closes."""


class Engine(ABC):
    """One model and the compute thread that runs it."""

    name: str
    tells_distributions: ClassVar[bool] = False  # whether its sequences have `logprobs`
    response_formats: ClassVar[tuple[FormatType, ...]] = ("text",)  # types; all but text need `Sampling.rules`
    model: ModelInfo
    tokenizer: Tokenizer
    compute: Compute
    admission: Admission
    rates: RateMeter

    def admit(self, *, priority: int = 0, deadline: float | None = None) -> AbstractAsyncContextManager[Claim]:
        """Wait for a place. `deadline` is an instant of `time.monotonic()`. Raises `Overloaded`, `DeadlineExceeded`."""
        return self.admission.admit(priority=priority, deadline=deadline)

    @abstractmethod
    def sequence(self, claim: Claim, capacity: int) -> AbstractAsyncContextManager[TokenSequence]:
        """Working memory for one request, about `capacity` tokens of it at once."""

    async def warm_up(self) -> None:  # noqa: B027 - most are as fast at first as later
        """Do before the first request what would make it slow. Raises what a request may."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop after the running step and give the memory back."""


def describe(settings: WorkerSettings, folder: Path, config: Any, generation_config: Any) -> ModelInfo:
    """Raises `MapperError` for a model whose KV is of another kind, `SettingsError` for one that is too short."""
    geometry = geometry_of(config)
    return ModelInfo(
        name=settings.model_name,
        fingerprint=fingerprint(folder),
        layout=KVLayout(
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            block_tokens=settings.block_tokens,
            dtype=settings.dtype,
        ),
        max_model_len=_max_model_len(settings, context_of(config)),
        vocab_size=config.vocab_size,
        eos_ids=_eos_ids(generation_config, config),
        device=settings.device,
        tokenizer_digest=tokenizer_digest(folder),
    )


def _max_model_len(settings: WorkerSettings, positions: int) -> int:
    if settings.max_model_len is not None and settings.max_model_len > positions:
        raise SettingsError(
            f"worker {settings.id!r}: max_model_len {settings.max_model_len} is more than the {positions} positions "
            f"of {settings.model!r}"
        )
    return settings.max_model_len or positions


def _eos_ids(*configs: Any) -> frozenset[int]:
    """The ids that end an answer: those of the generation config, else of the model's."""
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
