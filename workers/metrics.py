"""A worker's Prometheus metrics, in their own registry. Labels take only names defined in this code: no key, user, hash
or string of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from workers.api.schemas import Path
from workers.api.tasks import num_tasks
from workers.pool.entries import PoolStats

PREFIX = "kvrelay"
TTFT_BUCKETS = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TRANSFER_BUCKETS = (.001, .005, .01, .025, .05, .075, .1, .15, .2, .3, .5, .75, 1, 2.5, 5, 10, 30)  # fmt: skip

KL_BUCKETS = (.001, .002, .005, .01, .02, .05, .1, .2, .3, .5, 1, 2, 5, 10)  # fmt: skip


class _PoolCounters(Collector):
    """Exports the counters that a pool keeps, since a pool is used from any thread."""

    def __init__(self, stats: Callable[[], PoolStats]):
        self._stats = stats

    def collect(self) -> Iterator[CounterMetricFamily]:
        stats = self._stats()
        leases = CounterMetricFamily(f"{PREFIX}_kv_lease_events", "Leases for other workers", labels=["event"])
        for event, count in stats.lease_events.items():
            leases.add_metric([event], count)
        yield leases
        yield CounterMetricFamily(
            f"{PREFIX}_kv_cache_evictions", "Caches evicted from the pool", value=stats.num_evictions
        )
        yield CounterMetricFamily(
            f"{PREFIX}_kv_cache_recalls", "Caches recalled from the second tier", value=stats.num_recalls
        )


class WorkerMetrics:
    """One field per metric, named as in vLLM where vLLM has it. Updated on the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._num_answers = self._num_exact = 0
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival of a request to its first token")
        self.inter_token = self._histogram("inter_token_latency_seconds", "Time between tokens of an answer")
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival of a request to the end of its answer")
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "Prefill of the tokens that were not in the pool"
        )
        self.prefix_queries = self._counter("prefix_cache_queries_total", "Prompt tokens looked up")
        self.prefix_hits = self._counter("prefix_cache_hits_total", "Prompt tokens found as exact prefixes")
        self.mapped_tokens = self._counter("mapped_prompt_tokens_total", "Prompt tokens loaded from mapped caches")
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of answered requests")
        self.generation_tokens = self._counter("generation_tokens_total", "Generated tokens")
        self.requests = self._counter("worker_requests_total", "Calls, by route and status", "route", "status")
        self.disconnects = self._counter(
            "client_disconnects_total", "Clients that disconnected before the end", "phase"
        )
        self.transfers = self._counter("kv_transfer_total", "Handoffs from other workers, by result", "result")
        self.transfer_seconds = Histogram(
            f"{PREFIX}_kv_transfer_duration_seconds",
            "Duration of one handoff: lease, copy, map and check",
            buckets=TRANSFER_BUCKETS,
            registry=self.registry,
        )
        self.transfer_phase_seconds = Histogram(
            f"{PREFIX}_kv_transfer_phase_seconds",
            "Duration of the parts of handoffs: lease, check, open, head, copy, map, write",
            ["phase"],
            buckets=TRANSFER_BUCKETS,
            registry=self.registry,
        )
        self.transfer_scratch = self._gauge(
            "kv_transfer_scratch_bytes", "Memory that the last handoff needed besides the pools' blocks"
        )
        self.transfer_bytes = self._counter("kv_transfer_bytes_total", "Bytes of source KV read")
        self.transfer_tokens = self._counter("kv_transfer_tokens_total", "Tokens whose KV was mapped")
        self.sources_released = self._counter(
            "kv_transfer_sources_released_total", "Source caches dropped after their handoff"
        )
        self.transport_failures = self._counter(
            "kv_transport_failures_total",
            "Transports that failed to open or broke; the next one is tried",
            "transport",
            "reason",
        )
        self.answers = self._counter("answers_total", "Answers, by the source of their prompt's KV", "path")
        self._gauge("exact_answers_ratio", "Fraction of answers without mapped KV, 0 to 1").set_function(
            self._exact_ratio
        )
        self.upgrades = self._counter(
            "cache_upgrades_total", "Mapped caches upgraded to exact ones, by result", "result"
        )
        self._gauge("asyncio_tasks", "Tasks of the event loop").set_function(num_tasks)
        self.shadows = self._counter(
            "mapper_shadows_total", "Answers compared with a native cache, by result", "result"
        )
        self.shadow_kl = Histogram(
            f"{PREFIX}_mapper_shadow_kl",
            "Mean KL divergence of an answer's next tokens, native to mapped, in nats",
            ["bundle"],
            buckets=KL_BUCKETS,
            registry=self.registry,
        )
        self.shadow_top1 = self._counter(
            "mapper_shadow_top1_total",
            "Compared tokens, by whether both caches predict the same one",
            "bundle",
            "result",
        )
        self.bundle_usable = Gauge(
            f"{PREFIX}_mapper_usable", "1 for a bundle in use, 0 for one refused", ["bundle"], registry=self.registry
        )
        self.not_stored = self._counter(
            "cache_store_failures_total", "Answers whose KV could not be stored, by reason", "reason"
        )

    def watch(
        self, *, num_running: Callable[[], int], num_waiting: Callable[[], int], kv_usage: Callable[[], float]
    ) -> None:
        """Register gauges that are read on each scrape."""
        self._gauge("num_requests_running", "Running requests").set_function(num_running)
        self._gauge("num_requests_waiting", "Waiting requests").set_function(num_waiting)
        self._gauge("kv_cache_usage_perc", "Used fraction of the pool's blocks, 0 to 1").set_function(kv_usage)

    def watch_pool(self, stats: Callable[[], PoolStats]) -> None:
        """Register the pool's counts, read on each scrape."""
        self._gauge("kv_leases", "Leases that other workers hold").set_function(lambda: stats().num_leases)
        self._gauge("kv_host_tier_usage_perc", "Used fraction of the second tier, 0 to 1").set_function(
            lambda: stats().tier_usage
        )
        self.registry.register(_PoolCounters(stats))

    def answered(self, path: Path) -> None:
        self.answers.labels(path).inc()
        self._num_answers += 1
        self._num_exact += path in ("exact", "prefill")

    def _exact_ratio(self) -> float:
        return self._num_exact / self._num_answers if self._num_answers else 1.0

    def expose(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", what, buckets=TTFT_BUCKETS, registry=self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", what, registry=self.registry)
