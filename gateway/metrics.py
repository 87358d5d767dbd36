"""What is counted, under the names of vLLM after the prefix `kvrelay_` where vLLM has one.

What a worker counts of its caches and transfers (`kv_transfer_*`, `prefix_cache_*`) is not counted a second time here:
a sum over all jobs stays a sum. The gateway has `handoffs_*` and `prefix_lookup*` of its own.

No label ever takes a key, a user, a hash, a request id or a raw client string: `Labels` maps what a client wrote to
what is configured, else to `other`.
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from gateway.upstream.breaker import State
from gateway.upstream.limits import Gate
from workers.api.tasks import num_tasks

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
            "inter_token_latency_seconds", "Between two chunks of an answer", TOKEN_BUCKETS, "tier"
        )
        self.e2e_request_latency = spread(
            "e2e_request_latency_seconds", "Arrival to the end of the answer", LATENCY_BUCKETS, "tier"
        )
        self.request_prefill_time = spread(
            "request_prefill_time_seconds", "What the answering model took to read natively", TTFT_BUCKETS, "tier"
        )
        self.overhead = spread("overhead_seconds", "Time in the gateway, workers not counted", OVERHEAD_BUCKETS)
        self.num_requests_running = gauge("num_requests_running", "Calls under way to a tier", "tier")
        self.num_requests_waiting = gauge("num_requests_waiting", "Calls that wait for a place in a tier", "tier")

        self.prefix_lookups = count("prefix_lookups_total", "Prompts looked up in the registry", "tier")
        self.prefix_lookup_hits = count("prefix_lookup_hits_total", "Prompts of which a beginning was found", "tier")
        self.prefix_lookup_stale = count("prefix_lookup_stale_total", "Found, and lost at the worker", "tier")
        self.registry_ops = count("registry_ops_total", "Registry operations", "op", "result")

        self.cascade_decisions = count(
            "cascade_decisions_total", "What the policy decided", "policy", "decision", "reason"
        )
        self.cascade_confidence = spread(
            "cascade_confidence", "What the policy scored the small model's answer with", CONFIDENCE_BUCKETS
        )
        self.full_prefill_fallback = count(
            "full_prefill_fallback_total", "Answers that a failed fast path left to a full prefill", "reason"
        )
        self.handoffs = count("handoffs_total", "Handoffs asked for, by what came of it", "result")
        self.early_handoffs = count(
            "early_handoffs_total", "Handoffs begun while the small model still wrote: used, or dropped", "result"
        )
        self.handoff_duration = spread("handoff_duration_seconds", "A handoff, as the gateway waits", TTFT_BUCKETS)
        self.prefill_seconds_saved = count(
            "prefill_seconds_saved_total", "Predicted prefill of what was handed over, less the time of the handoff"
        )

        self.circuit_state = gauge("circuit_state", "0 closed, 1 half-open, 2 open", "target")
        self.circuit_transitions = count("circuit_transitions_total", "Circuit changes", "target", "to")
        self.config_generation = gauge("config_generation", "How many configurations this process has used")
        self.config_reload = count("config_reload_total", "Configurations read anew, by what came of it", "result")
        self.worker_restarts = count("worker_restarts_total", "Restarts noticed by a new epoch", "target")
        gauge("asyncio_tasks", "Tasks of the event loop").set_function(num_tasks)
        self.client_disconnects = count("client_disconnects_total", "Clients that hung up", "phase")

    def show_gate(self, tier: str, gate: Gate) -> None:
        """How many it holds is asked of it when somebody wants to know."""
        self.num_requests_running.labels(tier).set_function(lambda: gate.num_running)
        self.num_requests_waiting.labels(tier).set_function(lambda: gate.num_waiting)

    def circuit_changed(self, target: str, to: State) -> None:
        self.circuit_state.labels(target).set(to)
        self.circuit_transitions.labels(target, to.name.lower()).inc()

    def forget_worker(self, worker_id: str) -> None:
        """It is there no more; the names of workers that are found change without end."""
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
        """A handoff that took `took_s`, in place of a prefill predicted to take `prefill_s`."""
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
    """What `labels` has made it finds again by the values as they come: a request asks for ten."""
    metric.labels = cache(metric.labels)  # type: ignore[method-assign]
    return metric
