"""OpenTelemetry spans across gateway and workers, joined by W3C trace context.

    request ─┬─ route     the policy's decision
             ├─ prefix    the registry
             ├─ prefill   ── prefill (small worker)
             ├─ transfer  ── transfer (large worker) ── lease (small worker)
             └─ decode    ── decode (the answering worker)

Off, and nothing is imported, unless `tracing.endpoint` names a collector. No span holds any text of a prompt. The names
of the GenAI attributes are defined here only, as they still change.
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
    """`endpoint` accepts OTLP over HTTP, for example http://127.0.0.1:4318. `sample_ratio` is the share of the traces
    started here that are kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: HttpUrl | None = None
    sample_ratio: float = Field(default=1.0, gt=0, le=1)


class TracingUnavailable(RuntimeError):
    """Tracing is configured, but its packages are not installed."""


def start(settings: TracingSettings, service: str) -> None:
    """Export spans to the configured collector. Raises `TracingUnavailable`."""
    if settings.endpoint is None:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ImportError as error:
        message = f"tracing.endpoint requires the extra `otel`: pip install 'kvrelay[otel]' ({error})"
        raise TracingUnavailable(message) from error
    sampler = ParentBasedTraceIdRatio(settings.sample_ratio)
    provider = TracerProvider(sampler=sampler, resource=Resource.create({"service.name": service}))
    exporter = OTLPSpanExporter(endpoint=f"{settings.endpoint}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    use(provider)


def use(provider: TracerProvider | None) -> None:
    """Send spans to this provider from now on; None switches tracing off."""
    global _tracer
    _tracer = provider.get_tracer("kvrelay") if provider is not None else None


def is_on() -> bool:
    return _tracer is not None


def span(name: str, incoming: Mapping[str, str] | None = None) -> AbstractContextManager[None]:
    """A span around a block. Its parent is the trace in the headers of an `incoming` call, or else the current span."""
    return NOTHING if _tracer is None else _span(name, incoming)


@contextmanager
def _span(name: str, incoming: Mapping[str, str] | None) -> Iterator[None]:
    handle = begin(name, incoming)
    try:
        with handle.active():
            yield
    except BaseException as error:
        handle.set({ERROR_TYPE: getattr(error, "code", type(error).__name__)})
        raise
    finally:
        handle.end()


class SpanHandle:
    """A span that may end elsewhere than it began; without tracing, an empty one."""

    def __init__(self, span: Span | None):
        self._span = span

    def active(self) -> AbstractContextManager[Any]:
        """Within the block, it is the current span."""
        if self._span is None:
            return NOTHING
        from opentelemetry.trace import use_span

        return use_span(self._span, record_exception=False, set_status_on_exception=False)

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes, except those that are None."""
        if self._span is not None:
            self._span.set_attributes({key: value for key, value in attributes.items() if value is not None})

    def end(self) -> None:
        if self._span is not None:
            self._span.end()


def begin(name: str, incoming: Mapping[str, str] | None = None) -> SpanHandle:
    if _tracer is None:
        return SpanHandle(None)
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if incoming is None:
        return SpanHandle(_tracer.start_span(name))
    context = TraceContextTextMapPropagator().extract(incoming, context=Context())
    return SpanHandle(_tracer.start_span(name, context=context, kind=SpanKind.SERVER))


def set_attributes(attributes: Mapping[str, Any]) -> None:
    """Set attributes of the current span, except those that are None."""
    if _tracer is not None:
        from opentelemetry.trace import get_current_span

        SpanHandle(get_current_span()).set(attributes)


def headers() -> dict[str, str]:
    """Trace headers for a call made within the current span."""
    if _tracer is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier
