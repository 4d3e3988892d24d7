"""GET /metrics for Prometheus, and the numbers of the status page."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lorafold.engine import EngineStats
from lorafold.server.service import Service

__all__ = ["Metrics", "status_of"]


class Metrics(Collector):
    """The engine's numbers as Prometheus reads them; the base model has no `adapter` label.

    Args:
        service: whose engine is watched.

    Example: `lorafold.server.app` uses it.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """All metrics, in the text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All metrics. Part of prometheus_client's protocol."""
        stats = self._service.engine.stats()
        yield _requests(stats)
        per_adapter: list[tuple[type[Any], str, str, Mapping[str | None, int]]] = [
            (GaugeMetricFamily, "running", "Requests in the batch.", stats.running),
            (GaugeMetricFamily, "waiting", "Requests that wait for a place.", stats.waiting),
            (CounterMetricFamily, "prompt_tokens", "Tokens of prompts read.", stats.prompt_tokens),
            (CounterMetricFamily, "answer_tokens", "Tokens generated.", stats.answer_tokens),
        ]
        for family, name, text, values in per_adapter:
            metric = family(f"lorafold_{name}", text, labels=["adapter"])
            for adapter, value in values.items():
                metric.add_metric([adapter or ""], value)
            yield metric
        gauges = {
            "slots": ("Slots of the pool.", stats.max_loras),
            "slots_used": ("Slots with an adapter.", len(stats.slots)),
            "adapters": ("Adapters that can be named.", len(self._service.engine.adapters())),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"lorafold_{name}", text, value=value)
        counters = {
            "loads": ("Adapters read into host memory.", stats.num_loads),
            "load_seconds": ("Time spent reading them.", stats.load_seconds),
            "placements": ("Adapters placed into a slot.", stats.num_places),
            "placement_seconds": ("Time spent placing them.", stats.place_seconds),
            "evictions": ("Adapters that had to give way.", stats.num_evictions),
            "steps": ("Forwards of requests.", stats.num_steps),
            "step_seconds": ("Time of the engine's steps.", stats.step_seconds),
            "forward_seconds": ("Time of the forwards in them.", stats.forward_seconds),
        }
        for name, (text, number) in counters.items():
            yield CounterMetricFamily(f"lorafold_{name}", text, value=number)


def _requests(stats: EngineStats) -> Metric:
    metric = CounterMetricFamily(
        "lorafold_requests", "Requests that ended.", labels=["adapter", "outcome"]
    )
    for (adapter, outcome), value in stats.finished.items():
        metric.add_metric([adapter or "", outcome], value)
    return metric


def status_of(service: Service) -> dict[str, Any]:
    """What the status page shows.

    Args:
        service: whose engine is watched.
    """
    engine, stats = service.engine, service.engine.stats()
    slot_of = {name: slot for slot, name in stats.slots}
    finished: Counter[str | None] = Counter()
    for (adapter, _), value in stats.finished.items():
        finished[adapter] += value

    def row(adapter: str | None) -> dict[str, Any]:
        return {
            "name": service.model_name if adapter is None else adapter,
            "slot": None if adapter is None else slot_of.get(adapter),
            "running": stats.running[adapter],
            "waiting": stats.waiting[adapter],
            "finished": finished[adapter],
            "answer_tokens": stats.answer_tokens[adapter],
        }

    return {
        "model": service.model_name,
        "batching": "packed" if engine.is_packed else "static",
        "max_length": engine.max_length,
        "max_loras": stats.max_loras,
        "max_rank": engine.lora.pool.max_rank,
        "slots": dict(sorted(stats.slots)),
        "base": row(None),
        "adapters": [row(loaded.name) for loaded in engine.adapters()],
        "uptime_s": round(time.time() - service.started_at, 1),
        "answer_tokens": sum(stats.answer_tokens.values()),
        "evictions": stats.num_evictions,
    }
