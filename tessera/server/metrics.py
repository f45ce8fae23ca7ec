"""Count requests, tokens and times for Prometheus, in a registry of the server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tessera.engine.request import Delta
from tessera.engine.stats import EngineStats

_FIRST = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Metrics:
    """Hold the metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tessera_requests", "requests by endpoint and status", ["path", "status"], registry=self.registry
        )
        self.aborted = Counter(
            "tessera_requests_aborted",
            "requests whose client left before the answer was complete",
            registry=self.registry,
        )
        self.prompt = Counter("tessera_prompt_tokens", "tokens of prompts", registry=self.registry)
        self.answer = Counter("tessera_answer_tokens", "tokens of answers", registry=self.registry)
        self.first = Histogram(
            "tessera_time_to_first_token_seconds",
            "from the request to the first token",
            buckets=_FIRST,
            registry=self.registry,
        )
        self.each = Histogram(
            "tessera_time_per_token_seconds", "between two tokens of an answer", buckets=_TOKEN, registry=self.registry
        )
        self._engine = _EngineMetrics()
        self.registry.register(self._engine)

    def timer(self, started: float, prompts: Sequence[int]) -> RequestTimer:
        return RequestTimer(self, started, prompts)

    def text(self, stats: EngineStats | None) -> bytes:
        """Return the page of /metrics. `stats`: None if the engine does not answer in time."""
        self._engine.stats = stats
        return generate_latest(_WithoutTimes(self.registry))  # needs only a method `collect`


class _WithoutTimes:
    """Leave out the creation time that prometheus_client adds as a gauge to each metric of a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _EngineMetrics:
    """Return the statistics of the engine as metrics."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        if stats is None:
            return
        for name, text, value in (
            ("running", "requests in the batch of the engine", stats.running),
            ("waiting", "requests that wait for the engine", stats.waiting),
            ("blocks_used", "blocks of the cache that hold keys and values", stats.blocks_used),
            ("blocks", "blocks of the cache", stats.blocks),
        ):
            yield GaugeMetricFamily(f"tessera_engine_{name}", text, value=value)
        for name, text, value in (
            ("prefix_hits", "tokens of prompts whose keys and values were reused", stats.prefix_hits),
            ("encoder_hits", "images, frames and recordings whose embeddings were reused", stats.encoder_hits),
            ("preemptions", "answers that were interrupted because blocks ran out", stats.preemptions),
            ("generated", "tokens that the engine generated", stats.generated),
            ("prefilled", "tokens of prompts that the engine computed", stats.prefilled),
        ):
            yield CounterMetricFamily(f"tessera_engine_{name}", text, value=value)


class RequestTimer:
    """Measure the answers of one request."""

    def __init__(self, metrics: Metrics, started: float, prompts: Sequence[int]) -> None:
        self._metrics = metrics
        self._last = [started] * len(prompts)
        self._begun = [False] * len(prompts)
        metrics.prompt.inc(sum(prompts))

    def add(self, index: int, delta: Delta) -> None:
        count = len(delta.tokens)
        if not count:
            return
        now = time.perf_counter()
        seconds, self._last[index] = now - self._last[index], now
        if not self._begun[index]:
            self._begun[index] = True
            self._metrics.first.observe(seconds)
        else:
            self._metrics.each.observe(seconds / count)
        self._metrics.answer.inc(count)
