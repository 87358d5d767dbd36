"""Requests as clients send them: OpenAI's, with the optional fields `kvrelay` and `kv_transfer_params`.

A field that no engine supports is an error that names it; a field that does not change the answer is accepted and
ignored. A salt from the client is dropped: the gateway derives the tenant's salt itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gateway.settings import Limits
from workers.api.errors import InvalidRequest, RequestTooLarge
from workers.api.http.errors import invalid_request
from workers.api.schemas import DEFAULT_NATIVE_HEAD, DEFAULT_TTL_S, CacheId, Message, ResponseFormat, StreamOptions

R = TypeVar("R", bound="ClientRequest")

# Stop at the first invalid item: describing thousands would block the event loop.
Messages = Annotated[list[Message], Field(fail_fast=True)]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True)]

MARK = "cache_control"  # on a message or a part: the prefix up to here is stable
MAX_DEPTH = 64
MAX_VALUES = 32_768  # far more than any conversation needs; validating millions would block the event loop
MAX_FIELDS, FIELD_DEPTH = 256, 3  # fields of one object, at the levels whose fields are known
MAX_NAME_CHARS = 256
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


class ClientModel(BaseModel):
    """An object that a client sends. As in OpenAI's API, null means that the field was left out."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    dropped: ClassVar[tuple[str, ...]] = ()  # fields that are ignored, whatever their value

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None and name not in cls.dropped}


class KvrelayOptions(ClientModel):
    """The `kvrelay` request field. `exact` rules out mapped caches; `no_cache` neither looks up nor stores a cache;
    `agreement_probe` N compares N tokens of the answer with a full prefill (0: off)."""

    policy: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    max_tier: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    exact: bool = False
    explain: bool = False
    no_cache: bool = False
    agreement_probe: int = Field(default=0, ge=0, le=64)


class CacheChoice(ClientModel):
    """The `kv_transfer_params` request field: the client's own cache to answer from."""

    cache_id: CacheId


class ClientRequest(ClientModel):
    """Base of all requests."""

    dropped: ClassVar[tuple[str, ...]] = ("cache_salt", "tenant_salt")

    @property
    def conversation(self) -> list[Message]:
        """The messages as the client sent them, cache marks included."""
        return []

    @property
    def for_workers(self) -> list[Message]:
        """The messages as workers get them: without marks, content as one text."""
        return [plain(message) for message in self.conversation]


class PrefixRequest(ClientRequest):
    """`POST /v1/prefix/prefill`: a text, or a conversation or its first `stable_messages`, to prefill into a cache. The
    default `target_model` is the smallest that the key may use."""

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
    """`POST /v1/cache/transfer`: one model's cache, or its first `num_tokens` tokens, to map for another model."""

    cache_id: CacheId
    target_model: str = Field(min_length=1)
    mapper: str = Field(default="auto", min_length=1, max_length=MAX_NAME_CHARS)
    num_tokens: int | None = Field(default=None, ge=1)
    native_head: int = Field(default=DEFAULT_NATIVE_HEAD, ge=0)
    ttl_s: float = Field(default=DEFAULT_TTL_S, gt=0, le=86_400)
    deadline_ms: float | None = Field(default=None, gt=0)


class AnswerRequest(ClientRequest):
    """What chat and text completions have in common."""

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

    # Supported at the default value only.
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
    def _is_of_type(cls, value: Any, info: Any) -> Any:
        return _check_type(value, cls.model_fields[info.field_name].default)

    @model_validator(mode="after")
    def _cache_excludes_policy(self) -> AnswerRequest:
        if self.kv_transfer_params is not None and (self.kvrelay.no_cache or self.kvrelay.policy is not None):
            raise ValueError("kv_transfer_params cannot be combined with kvrelay.no_cache or kvrelay.policy")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def text(self) -> str | None:
        """The prompt of a text completion."""
        return None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return None

    @property
    def form(self) -> ResponseFormat | None:
        """The answer's response format; None for plain text."""
        return None

    @property
    def max_answer_tokens(self) -> int | None:
        raise NotImplementedError

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of alternatives to return with each token; None for no log-probabilities."""
        raise NotImplementedError


class ChatCompletionRequest(AnswerRequest):
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


class TextCompletionRequest(AnswerRequest):
    """One prompt as text; a list of one prompt is accepted."""

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
    def _are_of_type(cls, value: Any, info: Any) -> Any:
        return _check_type(value, cls.model_fields[info.field_name].default)

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


def _check_type(value: Any, default: Any) -> Any:
    """Tell booleans and numbers apart: in Python True equals 1."""
    if isinstance(value, bool) is not isinstance(default, bool):
        raise ValueError(f"Input should be {default}")
    return value


def num_stable(messages: Sequence[Message]) -> int:
    """How many of the first messages later requests will share: up to the last one with a `cache_control` mark (on the
    message or on one of its parts), else all before the last user turn."""
    marked = [index for index, message in enumerate(messages) if _is_marked(message)]
    if marked:
        return marked[-1] + 1
    users = [index for index, message in enumerate(messages) if message.role == "user"]
    return users[-1] if users else len(messages)


def plain(message: Message) -> Message:
    """The message as workers get it: content as one text, no mark."""
    if isinstance(message.content, str) and not _is_marked(message):
        return message
    fields = message.model_dump(exclude_none=True, exclude={MARK})
    if message.content is not None:
        fields["content"] = message.text
    return Message.model_validate(fields)


def _is_marked(message: Message) -> bool:
    parts = message.content if isinstance(message.content, list) else ()
    return bool(message.model_extra and message.model_extra.get(MARK)) or any(
        part.model_extra and part.model_extra.get(MARK) for part in parts
    )


def parse(raw: bytes, kind: type[R], limits: Limits) -> R:
    """Parse and validate a body. The shape is checked between the two, so that no body makes validation slow.

    Raises `InvalidRequest` naming the field, the value and what is allowed, or `RequestTooLarge`.
    """
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
    """Bound the number of values, fields and levels. Raises `RequestTooLarge` or `InvalidRequest`."""
    containers: list[Any] = [body]
    num_values = 0
    for depth in range(MAX_DEPTH):
        num_values += sum(map(len, containers))
        if num_values > MAX_VALUES:
            raise RequestTooLarge(f"the body holds more than {MAX_VALUES} values")
        if depth < FIELD_DEPTH and any(len(one) > MAX_FIELDS for one in containers if isinstance(one, dict)):
            raise RequestTooLarge(f"an object of the body has more than {MAX_FIELDS} fields")
        contents = (one.values() if isinstance(one, dict) else one for one in containers)
        containers = [value for values in contents for value in values if isinstance(value, (dict, list))]
        if not containers:
            return
    raise InvalidRequest(f"the body is nested more than {MAX_DEPTH} levels deep")
