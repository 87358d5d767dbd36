"""Spans over gateway and workers, in traces that go from one to the other as W3C has it. Off, and nothing imported,
unless `tracing.endpoint` names a collector.

    request ─┬─ route     the policy's decision
             ├─ prefix    the registry
             ├─ prefill   ── prefill (small worker)
             ├─ transfer  ── transfer (large worker) ── lease (small worker)
             └─ decode    ── decode (the answering worker)

No span bears a word of a prompt. The names of the GenAI attributes still move, and so stand here only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from workers.api.addresses import HttpUrl

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

REQUEST_MODEL, RESPONSE_MODEL, ERROR_TYPE = "gen_ai.request.model", "gen_ai.response.model", "error.type"
PATH = "kvrelay.path"

NOTHING = nullcontext()

_tracer: Tracer | None = None  # of this process


class TracingSettings(BaseModel):
    """`endpoint` takes OTLP over HTTP, as http://127.0.0.1:4318; of the traces that begin here `sample_ratio` are
    kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: HttpUrl | None = None
    sample_ratio: float = Field(default=1.0, gt=0, le=1)


class CannotTrace(RuntimeError):
    """It is wanted, and the packages for it are not installed."""


def start(settings: TracingSettings, service: str) -> None:
    """Raises `CannotTrace`."""
    if settings.endpoint is None:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ImportError as error:
        raise CannotTrace(f"tracing.endpoint needs the extra `otel`: pip install 'kvrelay[otel]' ({error})") from error
    sampler = ParentBasedTraceIdRatio(settings.sample_ratio)
    provider = TracerProvider(sampler=sampler, resource=Resource.create({"service.name": service}))
    exporter = OTLPSpanExporter(endpoint=f"{settings.endpoint}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    use(provider)


def use(provider: TracerProvider | None) -> None:
    """From now on spans go there; None ends it."""
    global _tracer
    _tracer = provider.get_tracer("kvrelay") if provider is not None else None


def is_on() -> bool:
    return _tracer is not None


def span(name: str, incoming: Mapping[str, str] | None = None) -> AbstractContextManager[None]:
    """What happens within. With the headers of an `incoming` call it goes on with the caller's trace, else with that of
    the span around it."""
    return NOTHING if _tracer is None else _span(name, incoming)


@contextmanager
def _span(name: str, incoming: Mapping[str, str] | None) -> Iterator[None]:
    held = begin(name, incoming)
    try:
        with held.entered():
            yield
    except BaseException as error:
        tell_of(held, {ERROR_TYPE: getattr(error, "code", type(error).__name__)})
        raise
    finally:
        held.end()


class Held:
    """A span that may end elsewhere than it began."""

    def __init__(self, span: Span | None):
        self.span = span

    def entered(self) -> AbstractContextManager[Any]:
        """What is begun within belongs to it."""
        if self.span is None:
            return NOTHING
        from opentelemetry.trace import use_span

        return use_span(self.span, record_exception=False, set_status_on_exception=False)

    def end(self) -> None:
        if self.span is not None:
            self.span.end()


def begin(name: str, incoming: Mapping[str, str] | None = None) -> Held:
    if _tracer is None:
        return Held(None)
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if incoming is None:
        return Held(_tracer.start_span(name))
    context = TraceContextTextMapPropagator().extract(incoming, context=Context())
    return Held(_tracer.start_span(name, context=context, kind=SpanKind.SERVER))


def tell(attributes: Mapping[str, Any]) -> None:
    """Of the span that is around."""
    if _tracer is not None:
        from opentelemetry.trace import get_current_span

        tell_of(Held(get_current_span()), attributes)


def tell_of(held: Held, attributes: Mapping[str, Any]) -> None:
    if held.span is not None:
        held.span.set_attributes({key: value for key, value in attributes.items() if value is not None})


def headers() -> dict[str, str]:
    """For a call that belongs to the span around it."""
    if _tracer is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier
