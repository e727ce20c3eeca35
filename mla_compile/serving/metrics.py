"""Prometheus metrics at `/metrics`."""

import functools
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mla_compile.engine.stats import EngineStats
from mla_compile.serving.messages import Update

_GAUGES = {
    "rows_in_use": "Running requests.",
    "max_rows": "Requests that can run at once.",
    "num_waiting": "Requests in the engine's queue.",
    "pages_in_use": "Cache pages that requests hold.",
    "num_pages": "Cache pages.",
    "step_seconds": "Host time of the last step.",
}
_COUNTERS = {
    "num_steps": "Steps launched.",
    "num_mixed_steps": "Steps with both decode rows and prompts.",
    "num_tokens": "Tokens generated.",
    "num_prompt_tokens": "Prompt tokens.",
    "num_reused_tokens": "Prompt tokens found in the prefix cache.",
    "num_verified": "Decode rows verified, summed over steps.",
    "num_verified_tokens": "Tokens that verified rows emitted.",
    "num_drafts": "Drafts of verified rows.",
    "num_preemptions": "Requests that lost their pages and restarted.",
}
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_NEXT = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.125, 0.25, 0.5, 1, 2)
_DELIVERY = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1)


class Metrics(Collector):
    """The metrics of one server. stats: the engine's latest; is_ready: whether the server accepts requests."""

    def __init__(self, stats: Callable[[], EngineStats], is_ready: Callable[[], bool]) -> None:
        self._stats, self._is_ready = stats, is_ready
        self._registry = CollectorRegistry()
        self._registry.register(self)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"mla_{name}_seconds", text, buckets=buckets, registry=self._registry)

        self._first_token = histogram("time_to_first_token", "From a request to its first token.", _FIRST)
        self._between_tokens = histogram("time_between_tokens", "Mean over an update's tokens.", _NEXT)
        self.delivery = histogram("delivery", "From a step's report to its bytes on the socket.", _DELIVERY)
        self.requests = Counter(
            "mla_requests", "By endpoint and HTTP status.", ["endpoint", "status"], registry=self._registry
        )
        accepted = Counter(
            "mla_accepted_tokens",
            "Tokens by the draft's position in its step; 0: the model's own tokens.",
            ["draft_position"],
            registry=self._registry,
        )
        self._accepted_at = functools.cache(accepted.labels)

    def count(self, update: Update, seconds: float, *, is_first: bool) -> None:
        """Count new tokens. seconds: since the completion's previous ones, or since its request."""
        if is_first:
            self._first_token.observe(seconds)
        else:
            self._between_tokens.observe(seconds / len(update.token_ids))
        for position in update.draft_positions:
            self._accepted_at(position).inc()

    def text(self) -> bytes:
        """The metrics in Prometheus' format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The metrics that are read from the engine's stats."""
        stats = self._stats()
        yield GaugeMetricFamily("mla_ready", "Whether the server accepts requests.", float(self._is_ready()))
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"mla_{name.removeprefix('num_')}", text, getattr(stats, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"mla_{name.removeprefix('num_')}", text, getattr(stats, name))
