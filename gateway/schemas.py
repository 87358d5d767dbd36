"""The gateway's requests, as clients write them: the OpenAI ones, plus the optional field `kvrelay`.

A field that the engine lacks is refused by name; one that changes no answer is accepted and ignored; a salt that the
client sends is dropped, since the tenant's salt is the gateway's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gateway.request.lookup import plain
from gateway.settings import Limits
from workers.api.errors import InvalidRequest, RequestTooLarge
from workers.api.http.errors import invalid_request
from workers.api.schemas import DEFAULT_NATIVE_HEAD, DEFAULT_TTL_S, CacheId, Message, ResponseFormat, StreamOptions

R = TypeVar("R", bound="ClientRequest")

# One item that is wrong is told; to find and describe them all would hold up everybody.
Messages = Annotated[list[Message], Field(fail_fast=True)]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True)]

MAX_DEPTH = 64
MAX_VALUES = 32_768  # far more than any conversation takes; checking millions would hold up everybody
MAX_FIELDS, FIELD_DEPTH = 256, 3  # of one object, as far down as it is known which fields there are
MAX_NAME_CHARS = 256
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


class Fields(BaseModel):
    """What a client asks by. A field that is null is one that is left out, as OpenAI's are."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    dropped: ClassVar[tuple[str, ...]] = ()  # unseen, where a client sends them

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None and name not in cls.dropped}


class KvrelayOptions(Fields):
    """The `kvrelay` request field. `exact` allows no mapped cache in the making of the answer; `no_cache` neither
    reads nor stores; `agreement_probe` N compares N tokens with a full prefill (0: not)."""

    policy: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    max_tier: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    exact: bool = False
    explain: bool = False
    no_cache: bool = False
    agreement_probe: int = Field(default=0, ge=0, le=64)


class CacheChoice(Fields):
    """The `kv_transfer_params` request field: a cache of the client's own, to answer from."""

    cache_id: CacheId


class ClientRequest(Fields):
    """What all requests have. `for_workers` are the messages as workers get them: no marks, content as one text."""

    dropped: ClassVar[tuple[str, ...]] = ("cache_salt", "tenant_salt")

    @property
    def conversation(self) -> list[Message]:
        """As the client wrote it, marks included."""
        return []

    @property
    def for_workers(self) -> list[Message]:
        return [plain(message) for message in self.conversation]


class PrefixRequest(ClientRequest):
    """`POST /v1/prefix/prefill`: a text or a conversation, to be read into a cache. Of a conversation all is read, or
    what its first `stable_messages` are rendered to. Without a `target_model` the smallest that the key may use."""

    target_model: str | None = Field(default=None, min_length=1)
    prefix: str | None = Field(default=None, min_length=1)
    messages: Messages | None = Field(default=None, min_length=1)
    tools: Tools | None = None
    stable_messages: int | None = Field(default=None, ge=1)
    ttl_s: float = Field(default=DEFAULT_TTL_S, gt=0, le=86_400)

    @model_validator(mode="after")
    def _one_form(self) -> PrefixRequest:
        if (self.prefix is None) == (self.messages is None):
            raise ValueError("give either prefix or messages")
        if self.messages is None and (self.tools is not None or self.stable_messages is not None):
            raise ValueError("tools and stable_messages go with messages")
        if (self.stable_messages or 0) > (given := len(self.conversation)):
            raise ValueError(f"stable_messages is {self.stable_messages}, but there are {given} messages")
        return self

    @property
    def conversation(self) -> list[Message]:
        return self.messages or []


class HandoffRequest(ClientRequest):
    """`POST /v1/cache/transfer`: a cache that one model holds, mapped for another; its first `num_tokens` tokens, or
    all."""

    cache_id: CacheId
    target_model: str = Field(min_length=1)
    mapper: str = Field(default="auto", min_length=1, max_length=MAX_NAME_CHARS)
    num_tokens: int | None = Field(default=None, ge=1)
    native_head: int = Field(default=DEFAULT_NATIVE_HEAD, ge=0)
    ttl_s: float = Field(default=DEFAULT_TTL_S, gt=0, le=86_400)
    deadline_ms: float | None = Field(default=None, gt=0)


class AskedFor(ClientRequest):
    """What both kinds of question have; the open part is what is to be read, as messages or as `text`."""

    is_chat: ClassVar[bool]

    model: str = Field(min_length=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    kvrelay: KvrelayOptions = KvrelayOptions()
    kv_transfer_params: CacheChoice | None = None

    # The values that mean "nothing asked for"; any other is refused, naming what is allowed.
    n: Literal[1] = 1
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0

    # Accepted and ignored.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @field_validator("n", "presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _of_its_type(cls, value: Any, info: Any) -> Any:
        return _no_other_type(value, cls.model_fields[info.field_name].default)

    @model_validator(mode="after")
    def _cache_leaves_no_choice(self) -> AskedFor:
        if self.kv_transfer_params is not None and (self.kvrelay.no_cache or self.kvrelay.policy is not None):
            raise ValueError("kv_transfer_params names a cache: neither kvrelay.no_cache nor kvrelay.policy go with it")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def text(self) -> str | None:
        """The prompt, where it is a text and no conversation."""
        return None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return None

    @property
    def form(self) -> ResponseFormat | None:
        """Of the answer; None for any text."""
        return None

    @property
    def max_answer_tokens(self) -> int | None:
        raise NotImplementedError

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told with each one; None for no log-probabilities at all."""
        raise NotImplementedError


class ChatCompletionRequest(AskedFor):
    is_chat: ClassVar[bool] = True

    messages: Messages = Field(min_length=1)
    tools: Tools | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Any = None  # ignored

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def conversation(self) -> list[Message]:
        return self.messages

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    @property
    def form(self) -> ResponseFormat | None:
        asked = self.response_format
        return None if asked is None or asked.type == "text" else asked

    @property
    def max_answer_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class TextCompletionRequest(AskedFor):
    """One prompt, as text: a list of one is taken for that one."""

    is_chat: ClassVar[bool] = False

    prompt: str = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    suffix: Literal[""] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        return prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt

    @field_validator("best_of", "echo", mode="before")
    @classmethod
    def _of_their_type(cls, value: Any, info: Any) -> Any:
        return _no_other_type(value, cls.model_fields[info.field_name].default)

    @property
    def conversation(self) -> list[Message]:
        return [Message(role="user", content=self.prompt)]

    @property
    def text(self) -> str | None:
        return self.prompt

    @property
    def max_answer_tokens(self) -> int | None:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs


def _no_other_type(value: Any, default: Any) -> Any:
    """True is not 1, nor is 0 False, though Python takes one for the other."""
    if isinstance(value, bool) is not isinstance(default, bool):
        raise ValueError(f"Input should be {default}")
    return value


def parse(raw: bytes, kind: type[R], limits: Limits) -> R:
    """Raises `InvalidRequest` naming the field, the value and what is allowed, or `RequestTooLarge`."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body is a JSON {type(body).__name__}; an object is needed")
    _check_shape(body)
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise invalid_request(error.errors(include_url=False), kind.model_fields, hide_private=False) from error
    if len(request.conversation) > limits.max_messages:
        raise RequestTooLarge(
            f"{len(request.conversation)} messages; at most {limits.max_messages} are allowed", param="messages"
        )
    return request


def _check_shape(body: dict[str, Any]) -> None:
    """Raises `RequestTooLarge` or `InvalidRequest` for more values, or more levels of them, than are allowed."""
    containers: list[Any] = [body]
    num_values = 0
    for depth in range(MAX_DEPTH):
        num_values += sum(map(len, containers))
        if num_values > MAX_VALUES:
            raise RequestTooLarge(f"the body holds more than {MAX_VALUES} values")
        if depth < FIELD_DEPTH and any(len(one) > MAX_FIELDS for one in containers if isinstance(one, dict)):
            raise RequestTooLarge(f"an object of the body has more than {MAX_FIELDS} fields")
        containers = [inner for one in containers for inner in _inside(one) if isinstance(inner, (dict, list))]
        if not containers:
            return
    raise InvalidRequest(f"the body is nested more than {MAX_DEPTH} levels deep")


def _inside(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container
