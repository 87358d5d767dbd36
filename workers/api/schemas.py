"""The messages between gateway and workers, and between two workers.

Requests reject unknown fields by name; replies ignore them, so that a newer worker can talk to an older gateway.
Digests and fingerprints are SHA-256 in lower-case hex. Durations are in milliseconds (`_ms`) or seconds (`_s`), times
of day in Unix seconds (`_at`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

CacheId = Annotated[str, Field(pattern=r"^kvc-[0-9a-f]{32}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
TenantSalt = Annotated[str, Field(pattern=r"^[0-9a-f]{16,128}$")]
Count = Annotated[int, Field(ge=0)]
Provenance = str  # "exact", or "mapped:<bundle id>"
MAPPED = "mapped:"  # prefix of the provenance of mapped caches
FormatType = Literal["text", "json_object", "json_schema"]
Path = Literal["exact", "mapped", "hybrid", "prefill"]

DEFAULT_NATIVE_HEAD = 4
DEFAULT_NATIVE_TAIL = 64
DEFAULT_TTL_S = 300.0
ESCALATION_PRIORITY = 10  # ahead of all other work: the client has already waited for one answer
SECRET_HEADER = "x-kvrelay-secret"


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reply(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    arguments: str = ""


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One OpenAI chat message. Only text content is accepted."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def plain(self) -> dict[str, Any]:
        """The message as plain JSON, without nulls."""
        if isinstance(self.content, str) and self.tool_calls is None and not self.model_extra:
            return {"role": self.role, "content": self.content}
        return self.model_dump(exclude_none=True)


class Prompt(Request):
    """What to prefill, in exactly one of three forms. The first `stable_messages` messages are the prefix that later
    requests share; the worker finds the token boundary."""

    prefix: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    stable_messages: int | None = Field(default=None, ge=1)
    token_ids: list[int] | None = None

    @model_validator(mode="after")
    def _exactly_one_form(self) -> Prompt:
        given = [name for name in ("prefix", "messages", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of prefix, messages, token_ids; got {', '.join(given) or 'none'}")
        if not getattr(self, given[0]):
            raise ValueError(f"{given[0]} is empty")
        if self.messages is None and (self.tools is not None or self.stable_messages is not None):
            raise ValueError("tools and stable_messages require messages")
        if self.messages is not None and (self.stable_messages or 0) > len(self.messages):
            raise ValueError(f"stable_messages is {self.stable_messages}, but messages has {len(self.messages)}")
        return self


class PrefillRequest(Prompt):
    target_model: str | None = None
    tenant_salt: TenantSalt
    ttl_s: float = Field(default=DEFAULT_TTL_S, gt=0, le=86_400)
    deadline_ms: float | None = Field(default=None, gt=0)


class CacheReply(Reply):
    """A cache in the answering worker's pool. `num_tokens` counts all its tokens."""

    cache_id: CacheId
    num_tokens: Count
    digest: Digest
    epoch: str
    expires_at: float
    provenance: Provenance = "exact"


class PrefillReply(CacheReply):
    """`cached_tokens` were in the pool before the call."""

    cached_tokens: Count
    prefill_ms: float


class TransferRequest(Request):
    """Map a cache of another worker into this one's pool.

    Covers the first `num_tokens` tokens of the source cache (default: all). The target prefills the first `native_head`
    itself, from the ticket's token ids, and maps the rest. The caller leaves out the native tail.

    With `by_cost` the target decides by its measured rates. It may map fewer tokens; the reply's `num_tokens` says how
    many, the caller's next request prefills a longer tail, and its path is `hybrid`. It raises `PrefillCheaper` if a
    full prefill is predicted to take no longer than the handoff, and `NoTime` if the handoff is predicted to end after
    `deadline_ms`; neither is a failure. Without `by_cost` it does what is asked.
    """

    cache_id: CacheId
    source_worker: str
    source_model: str | None = None
    target_model: str | None = None
    mapper: str = "auto"
    num_tokens: int | None = Field(default=None, ge=1)
    native_head: int = Field(default=DEFAULT_NATIVE_HEAD, ge=0)
    tenant_salt: TenantSalt
    ttl_s: float = Field(default=DEFAULT_TTL_S, gt=0, le=86_400)
    deadline_ms: float = Field(gt=0)
    by_cost: bool = False


TRANSFER_PHASES = ("lease", "check", "open", "head", "copy", "map", "write")


class TransferReply(CacheReply):
    """A finished handoff, and where its time went.

    lease_ms: getting the ticket.
    check_ms: checking it, and deciding.
    open_ms: opening the source's pool; about 0 once it is open.
    head_ms: prefilling the native head.
    copy_ms: copying layers that both models share; over a network, receiving everything.
    map_ms, write_ms: mapping the other layers, and writing them.
    total_ms: all of these, and waiting for compute in between.
    bytes: size of the mapped tokens in the source's pool.
    decision, reason: `map` or `hybrid`, and why.
    reused_tokens: tokens mapped by an earlier, shorter handoff of the same conversation, and not transferred again.
    transport: the transport that was used in the end.
    scratch_bytes: memory used in addition to the blocks of both pools.
    """

    mapper: str
    map_ms: float
    copy_ms: float
    total_ms: float
    bytes: int
    lease_ms: float = 0.0
    check_ms: float = 0.0
    open_ms: float = 0.0
    head_ms: float = 0.0
    write_ms: float = 0.0
    decision: Literal["map", "hybrid"] = "map"
    reason: str = "asked"
    reused_tokens: Count = 0
    transport: str = "none"
    scratch_bytes: int = 0

    @property
    def phases_ms(self) -> dict[str, float]:
        """Times by phase, in order of their start; copying, mapping and writing alternate."""
        return {phase: getattr(self, f"{phase}_ms") for phase in TRANSFER_PHASES}


class LeaseRequest(Request):
    ttl_s: float = Field(gt=0, le=600)
    tenant_salt: TenantSalt


class KVLayout(Reply):
    """The layout of a pool's block: C-contiguous `[num_layers, 2 (key, value), block_tokens, num_kv_heads, head_dim]`
    of `dtype`. Keys are post-RoPE at absolute positions that start at 0."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str

    @property
    def block_elements(self) -> int:
        return self.num_layers * 2 * self.block_tokens * self.num_kv_heads * self.head_dim


class PoolExport(Reply):
    """How another process opens the pool. `kind` is the transport; `address` holds a file (`shm`), a memory handle
    (`cuda_ipc`) or a network address (`tcp`)."""

    kind: str
    address: dict[str, str | int]
    num_blocks: int
    epoch: str


class Site(Reply):
    """What a worker can open: its `transports`, the `host` whose shared memory it sees (kernel and mounted file
    system), its own `process`, and its `gpus` by PCI bus id."""

    transports: list[str]
    host: str = ""
    process: str = ""
    gpus: list[str] = []


class Ticket(Reply):
    """The right to read one cache until the lease ends. `exports` are all ways to open the pool, including `pool`."""

    lease_id: str
    cache_id: CacheId
    pool: PoolExport
    layout: KVLayout
    blocks: list[int]
    generations: list[int]
    token_ids: list[int]
    num_tokens: int
    digest: Digest
    model: str
    fingerprint: Digest
    provenance: Provenance
    expires_at: float
    exports: list[PoolExport] = []

    @property
    def ways(self) -> list[PoolExport]:
        """All ways to open the pool; an older worker reports only `pool`."""
        return self.exports or [self.pool]


class CacheInfo(CacheReply):
    model: str
    created_at: float
    num_leases: int
    bytes: int


class KVTransferParams(Request):
    """Extension of an OpenAI request.

    `num_tokens` caps how much of the cache is used. Without a `cache_id` the worker searches for an exact prefix,
    unless `reuse` is false. With `store` false, nothing this request computes stays in the pool. With `shadow`, the
    idle worker later compares next-token distributions over the mapped and a native cache.
    """

    cache_id: CacheId | None = None
    num_tokens: int | None = Field(default=None, ge=1)
    require_exact: bool = False
    reuse: bool = True
    store: bool = True
    ttl_s: float = Field(default=DEFAULT_TTL_S, gt=0, le=86_400)
    agreement_probe: int = Field(default=0, ge=0, le=64)
    shadow: bool = False


class StreamOptions(Request):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class WorkerStreamOptions(StreamOptions):
    """`interval_ms` is the minimum interval between chunks after the first, for callers that buffer the answer."""

    interval_ms: float = Field(default=0.0, ge=0, le=60_000)


class JsonSchema(BaseModel):
    """The schema of an answer. The engine always enforces it, whatever `strict` says; it ignores `name` and
    `description`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, serialize_by_alias=True)

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    rules: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    type: FormatType = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") is (self.json_schema is None):
            raise ValueError("json_schema is required for type json_schema, and not allowed for any other")
        return self

    @property
    def rules(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for free text."""
        if self.json_schema is not None:
            return self.json_schema.rules
        return {"type": "object"} if self.type == "json_object" else None


class ChatRequest(BaseModel):
    """The worker's `/v1/chat/completions`. OpenAI fields that the engine does not support are rejected by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    stable_messages: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: WorkerStreamOptions | None = None
    kv_transfer_params: KVTransferParams | None = None
    tenant_salt: TenantSalt
    deadline_ms: float | None = Field(default=None, gt=0)
    priority: int = Field(default=0, ge=-10, le=10)


class CompletionRequest(BaseModel):
    """The worker's `/v1/completions`: one prompt, as text or token ids."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    prompt: str | list[int]
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool = False
    stream_options: WorkerStreamOptions | None = None
    kv_transfer_params: KVTransferParams | None = None
    tenant_salt: TenantSalt
    deadline_ms: float | None = Field(default=None, gt=0)
    priority: int = Field(default=0, ge=-10, le=10)


class KVUsage(Reply):
    """What the engine did for one answer: `kv_transfer_params` of the reply, or of the last chunk.

    A stream's first chunk may hold what is known before the first token: path, cached and mapped tokens.

    `cache_id` covers all `num_tokens` tokens, prefilled and generated. `cached_tokens` are exact prefix hits,
    `mapped_tokens` came from a mapper, the rest of the prompt was prefilled. With `agreement_probe` N, the worker also
    prefilled the whole prompt and reports the agreement over N teacher-forced tokens.
    """

    cache_id: CacheId | None = None
    num_tokens: Count = 0
    digest: Digest | None = None
    epoch: str
    expires_at: float | None = None
    provenance: Provenance = "exact"
    path: Path
    cached_tokens: Count = 0
    mapped_tokens: Count = 0
    stable_tokens: Count | None = None
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    top1_agreement: float | None = None
    full_prefill_ms: float | None = None


class TokenizeReply(Reply):
    token_ids: list[int]
    num_tokens: int
    stable_tokens: int | None = None


class ShadowInfo(Reply):
    """A mapper's quality in service, over the last compared answers.

    `top1` is the share of tokens with the same top prediction over mapped and native caches; `ppl_ratio` is the
    perplexity ratio that corresponds to their mean KL divergence.
    """

    num_answers: int
    top1: float
    ppl_ratio: float


class BundleInfo(Reply):
    """A bundle that is not `usable` is refused for `reason`. One `on_trial` is evaluated on the handoffs that
    are refused because of it. `shadow` is null until an answer was compared."""

    bundle_id: str
    source_model: str
    source_fingerprint: Digest
    target_fingerprint: Digest
    method: str
    usable: bool
    on_trial: bool = False
    reason: str | None = None
    shadow: ShadowInfo | None = None


class Rates(Reply):
    """Measured medians in tokens per second; None until measured."""

    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    map_tokens_per_s: float | None = None


class WorkerInfo(Reply):
    """A worker's description. `exports` are the ways to open its pool, and `site` is what it can open itself; together
    they decide how one worker reads another. `response_formats` are the types that its engine supports."""

    worker: str
    model: str
    fingerprint: Digest
    engine: str
    device: str
    layout: KVLayout
    epoch: str
    max_model_len: int
    transports: list[str]
    bundles: list[BundleInfo]
    pool_blocks: int
    free_blocks: int
    rates: Rates
    pid: int
    exports: list[PoolExport] = []
    site: Site | None = None
    response_formats: list[str] = ["text"]
