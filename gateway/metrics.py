"""The gateway's metrics. After the prefix `kvrelay_` they are named as in vLLM, where vLLM has the same one.

What a worker counts of its caches and transfers (`kv_transfer_*`, `prefix_cache_*`) is not counted again here, so that
a sum over all jobs stays right. The gateway has its own `handoffs_*` and `prefix_lookup*`.

No label ever holds a key, a user, a hash, a request id or a raw client string: unknown values become `other`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from workers.api.tasks import num_tasks

if TYPE_CHECKING:
    from gateway.upstream.breaker import State
    from gateway.upstream.limits import Gate

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
OVERHEAD_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
CONFIDENCE_BUCKETS = (
    *(-8.0, -4.0, -2.0, -1.5, -1.0, -0.8, -0.6, -0.5, -0.4, -0.3, -0.2, -0.1, 0.0),  # of log-probabilities
    *(0.1, 0.25, 0.5, 0.75, 0.9, 1.0),  # of probabilities
)
OTHER = "other"

M = TypeVar("M", bound=MetricWrapperBase)


class Metrics:
    """One set of metrics for one app, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        count, gauge, spread = self._counter, self._gauge, self._histogram

        self.requests = count("requests_total", "Requests by model and HTTP status", "model", "status")
        self.time_to_first_token = spread(
            "time_to_first_token_seconds", "Arrival to the first token", TTFT_BUCKETS, "tier", "path"
        )
        self.inter_token_latency = spread(
            "inter_token_latency_seconds", "Time between two chunks of an answer", TOKEN_BUCKETS, "tier"
        )
        self.e2e_request_latency = spread(
            "e2e_request_latency_seconds", "Arrival to the end of the answer", LATENCY_BUCKETS, "tier"
        )
        self.request_prefill_time = spread(
            "request_prefill_time_seconds", "Native prefill of the answering model", TTFT_BUCKETS, "tier"
        )
        self.overhead = spread("overhead_seconds", "Time in the gateway, workers not counted", OVERHEAD_BUCKETS)
        self.num_requests_running = gauge("num_requests_running", "Calls in flight to a tier", "tier")
        self.num_requests_waiting = gauge("num_requests_waiting", "Calls waiting for a slot in a tier", "tier")

        self.prefix_lookups = count("prefix_lookups_total", "Prompts looked up in the registry", "tier")
        self.prefix_lookup_hits = count("prefix_lookup_hits_total", "Prompts with a registered prefix", "tier")
        self.prefix_lookup_stale = count("prefix_lookup_stale_total", "Hits that the worker no longer held", "tier")
        self.registry_ops = count("registry_ops_total", "Registry operations", "op", "result")

        self.cascade_decisions = count(
            "cascade_decisions_total", "Decisions of the policy", "policy", "decision", "reason"
        )
        self.cascade_confidence = spread(
            "cascade_confidence", "Scores that the policy gave the small model's answers", CONFIDENCE_BUCKETS
        )
        self.full_prefill_fallback = count("full_prefill_fallback_total", "Fallbacks to a full prefill", "reason")
        self.handoffs = count("handoffs_total", "Handoffs by result", "result")
        self.early_handoffs = count(
            "early_handoffs_total", "Handoffs started during judgement: used or dropped", "result"
        )
        self.handoff_duration = spread("handoff_duration_seconds", "Duration of a handoff", TTFT_BUCKETS)
        self.prefill_seconds_saved = count(
            "prefill_seconds_saved_total", "Predicted prefill time saved by handoffs, their own time subtracted"
        )

        self.circuit_state = gauge("circuit_state", "0 closed, 1 half-open, 2 open", "target")
        self.circuit_transitions = count("circuit_transitions_total", "Circuit transitions", "target", "to")
        self.config_generation = gauge("config_generation", "Number of configurations that this process has used")
        self.config_reload = count("config_reload_total", "Configuration reloads by result", "result")
        self.worker_restarts = count("worker_restarts_total", "Worker restarts, noticed by a new epoch", "target")
        gauge("asyncio_tasks", "Tasks of the event loop").set_function(num_tasks)
        self.client_disconnects = count("client_disconnects_total", "Clients that hung up", "phase")

    def show_gate(self, tier: str, gate: Gate) -> None:
        """Export a gate's counts, read when metrics are scraped."""
        self.num_requests_running.labels(tier).set_function(lambda: gate.num_running)
        self.num_requests_waiting.labels(tier).set_function(lambda: gate.num_waiting)

    def circuit_changed(self, target: str, to: State) -> None:
        self.circuit_state.labels(target).set(to)
        self.circuit_transitions.labels(target, to.name.lower()).inc()

    def forget_worker(self, worker_id: str) -> None:
        """Drop the series of a worker that is gone: discovered workers' names never stop changing."""
        for target in (worker_id, f"{worker_id}/transfer"):
            for of_target in (self.circuit_state, self.circuit_transitions, self.worker_restarts):
                of_target.remove_by_labels({"target": target})
                of_target.labels.cache_clear()  # type: ignore[union-attr]

    def first_token(self, tier: str, path: str, ttft_s: float, overhead_s: float) -> None:
        self.time_to_first_token.labels(tier, path).observe(ttft_s)
        self.overhead.observe(overhead_s)

    def answered(self, tier: str, took_s: float, prefill_s: float | None) -> None:
        self.e2e_request_latency.labels(tier).observe(took_s)
        if prefill_s is not None:
            self.request_prefill_time.labels(tier).observe(prefill_s)

    def handed_over(self, took_s: float, prefill_s: float) -> None:
        """A handoff that took `took_s` instead of a prefill predicted to take `prefill_s`."""
        self.handoffs.labels("ok").inc()
        self.handoff_duration.observe(took_s)
        self.prefill_seconds_saved.inc(max(0.0, prefill_s - took_s))

    def registry_op(self, op: str, result: str) -> None:
        self.registry_ops.labels(op, result).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return _kept(Counter(f"kvrelay_{name}", what, labels, registry=self.registry))

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return _kept(Gauge(f"kvrelay_{name}", what, labels, registry=self.registry))

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return _kept(Histogram(f"kvrelay_{name}", what, labels, buckets=buckets, registry=self.registry))


def _kept(metric: M) -> M:
    """Cache the children of a metric by label values: a request needs ten of them."""
    metric.labels = cache(metric.labels)  # type: ignore[method-assign]
    return metric
