"""A worker's Prometheus metrics, in a registry of their own. No label ever takes a key, a user, a hash or a request's
string: only names that this code holds."""

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
    """The counters of a pool, which keeps them itself: it is used from any thread."""

    def __init__(self, stats: Callable[[], PoolStats]):
        self._stats = stats

    def collect(self) -> Iterator[CounterMetricFamily]:
        stats = self._stats()
        leases = CounterMetricFamily(f"{PREFIX}_kv_lease_events", "Leases for other workers", labels=["event"])
        for event, count in stats.lease_events.items():
            leases.add_metric([event], count)
        yield leases
        yield CounterMetricFamily(f"{PREFIX}_kv_cache_evictions", "Caches that made room", value=stats.num_evictions)
        yield CounterMetricFamily(
            f"{PREFIX}_kv_cache_recalls", "Caches that came back from the second tier", value=stats.num_recalls
        )


class WorkerMetrics:
    """One field a metric, named as in vLLM where vLLM has it. Written on the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._num_answers = self._num_exact = 0
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival of a request to its first token")
        self.inter_token = self._histogram("inter_token_latency_seconds", "From one token of an answer to the next")
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival of a request to the end of its answer")
        self.prefill = self._histogram("request_prefill_time_seconds", "Reading of what was not in the pool")
        self.prefix_queries = self._counter("prefix_cache_queries_total", "Prompt tokens looked up")
        self.prefix_hits = self._counter("prefix_cache_hits_total", "Prompt tokens found as exact prefixes")
        self.mapped_tokens = self._counter("mapped_prompt_tokens_total", "Prompt tokens taken from mapped caches")
        self.prompt_tokens = self._counter("prompt_tokens_total", "Tokens of the prompts answered")
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens written")
        self.requests = self._counter("worker_requests_total", "Calls, by route and status", "route", "status")
        self.disconnects = self._counter("client_disconnects_total", "Clients that hung up before the end", "phase")
        self.transfers = self._counter("kv_transfer_total", "Caches taken from other workers, by outcome", "result")
        self.transfer_seconds = Histogram(
            f"{PREFIX}_kv_transfer_duration_seconds",
            "Lease, copy, map and check of one cache that was taken over",
            buckets=TRANSFER_BUCKETS,
            registry=self.registry,
        )
        self.transfer_phase_seconds = Histogram(
            f"{PREFIX}_kv_transfer_phase_seconds",
            "Parts of the caches taken over: lease, check, open, head, copy, map, write",
            ["phase"],
            buckets=TRANSFER_BUCKETS,
            registry=self.registry,
        )
        self.transfer_scratch = self._gauge(
            "kv_transfer_scratch_bytes", "Memory that the last cache taken over needed beside the pools' blocks"
        )
        self.transfer_bytes = self._counter("kv_transfer_bytes_total", "Bytes of source KV read")
        self.transfer_tokens = self._counter("kv_transfer_tokens_total", "Tokens whose KV was mapped")
        self.sources_released = self._counter(
            "kv_transfer_sources_released_total", "Source caches given up once they were handed over"
        )
        self.transport_failures = self._counter(
            "kv_transport_failures_total",
            "Ways to a source that did not open or broke; the next is tried then",
            "transport",
            "reason",
        )
        self.answers = self._counter("answers_total", "Answers, by where their prompts came from", "path")
        self._gauge("exact_answers_ratio", "Part of the answers that no mapped KV served, 0 to 1").set_function(
            self._exact_ratio
        )
        self.upgrades = self._counter("cache_upgrades_total", "Mapped caches read again natively, by outcome", "result")
        self._gauge("asyncio_tasks", "Tasks of the event loop").set_function(num_tasks)
        self.shadows = self._counter("mapper_shadows_total", "Answers compared with native ones, by outcome", "result")
        self.shadow_kl = Histogram(
            f"{PREFIX}_mapper_shadow_kl",
            "Mean KL divergence of an answer's next tokens, native to mapped, in nats",
            ["bundle"],
            buckets=KL_BUCKETS,
            registry=self.registry,
        )
        self.shadow_top1 = self._counter(
            "mapper_shadow_top1_total", "Compared tokens, by whether both caches expect the same", "bundle", "result"
        )
        self.bundle_usable = Gauge(
            f"{PREFIX}_mapper_usable", "1 for a bundle in use, 0 for one refused", ["bundle"], registry=self.registry
        )
        self.not_stored = self._counter(
            "cache_store_failures_total", "Answers whose KV could not be kept, by why", "reason"
        )

    def watch(
        self, *, num_running: Callable[[], int], num_waiting: Callable[[], int], kv_usage: Callable[[], float]
    ) -> None:
        """Gauges that are read when they are asked for."""
        self._gauge("num_requests_running", "Requests that hold working memory").set_function(num_running)
        self._gauge("num_requests_waiting", "Requests that wait for a place").set_function(num_waiting)
        self._gauge("kv_cache_usage_perc", "Used part of the pool's blocks, 0 to 1").set_function(kv_usage)

    def watch_pool(self, stats: Callable[[], PoolStats]) -> None:
        """What the pool has counted, read when it is asked for."""
        self._gauge("kv_leases", "Leases that other workers hold").set_function(lambda: stats().num_leases)
        self._gauge("kv_host_tier_usage_perc", "Used part of the second tier, 0 to 1").set_function(
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
        """The text format of Prometheus."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", what, buckets=TTFT_BUCKETS, registry=self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", what, registry=self.registry)
