"""What the server counts, and how it looks to Prometheus.

The counts are plain numbers of one event loop, so that a member's request costs a few dictionary look-ups. Only a scrape loads
prometheus-client, and it uses a registry of its own: two servers in one process, or a user's own metrics, never meet. No label holds the
name of a job, a key or a host: what strangers to the operator choose must not make new time series.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from aiodist.rendezvous.job import Job
from aiodist.rendezvous.messages import Answer, Beat, Cancel, Notices, Refused, Request, Roster, Welcome
from aiodist.rendezvous.views import summarise

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["CONTENT_TYPE", "Census", "Metrics", "Open"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Open = dict[int, tuple[str, float]]
"""The requests of a connection that have no answer yet: kind and time of arrival by number."""

_BOUNDS: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)
_PREFIX: Final = "aiodist_rendezvous_"


class _Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(_BOUNDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        bounds = [*(str(bound) for bound in _BOUNDS), "+Inf"]
        return [(bound, float(count)) for bound, count in zip(bounds, accumulate(self._counts), strict=True)]


@dataclass
class Census:
    """What there is at the moment of a scrape."""

    jobs: Iterable[Job]
    waits: Counter[str]
    connections: int
    watchers: int


@dataclass
class Metrics:
    """The counts of one server."""

    beats: int = 0
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[str, _Histogram] = field(default_factory=dict)
    http_requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    http_seconds: dict[str, _Histogram] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)

    def arrived(self, open_: Open, request: Request, now: float) -> None:
        """A member's request came."""
        if isinstance(request, Beat):
            self.beats += 1
        elif isinstance(request, Cancel):
            kind, began = open_.pop(request.id, ("", now))
            if kind:
                self._ended(kind, "cancelled", now - began)
        elif number := getattr(request, "id", 0):
            open_.setdefault(number, (type(request).__name__.lower(), now))

    def answered(self, open_: Open, answer: Answer, now: float) -> None:
        """A member is sent something."""
        if isinstance(answer, Welcome | Roster | Notices):
            return
        if answer.id == 0:
            self.refused["message"] += 1
        elif answer.id in open_:
            kind, began = open_.pop(answer.id)
            self._ended(kind, answer.code if isinstance(answer, Refused) else "done", now - began)

    def served(self, route: str, status: int, seconds: float | None) -> None:
        """An HTTP request was answered; ``seconds`` is None for what stays open as long as the client likes."""
        self.http_requests[route, str(status)] += 1
        if seconds is not None:
            self.http_seconds.setdefault(route, _Histogram()).observe(seconds)

    def exposition(self, census: Census) -> bytes:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self, census))
        return generate_latest(registry)

    def _ended(self, kind: str, outcome: str, seconds: float) -> None:
        self.requests[kind, outcome] += 1
        self.seconds.setdefault(kind, _Histogram()).observe(seconds)


class _Collector:
    def __init__(self, metrics: Metrics, census: Census) -> None:
        self._metrics = metrics
        self._census = census

    def collect(self) -> Iterator[Metric]:
        census, metrics = self._census, self._metrics
        jobs: Counter[str] = Counter()
        members: Counter[str] = Counter({"active": 0, "away": 0, "stalled": 0, "stuck": 0, "forming": 0, "lost": 0, "failed": 0, "left": 0})
        keys = nbytes = 0
        for job in census.jobs:
            summary = summarise(job)
            jobs[summary.state] += 1
            members.update(summary.members_by_state)
            keys += sum(len(world.keys) for world in job.worlds.values())
            nbytes += sum(world.nbytes for world in job.worlds.values())
        yield _gauge("jobs", "Jobs that are known, by state.", jobs, "state")
        yield _gauge("members", "Members of the jobs' worlds, by state.", members, "state")
        yield _gauge("waits", "Requests that wait, by kind.", census.waits, "kind")
        yield _gauge("connections", "Open connections of members.", census.connections)
        yield _gauge("watchers", "Open live views.", census.watchers)
        yield _gauge("keys", "Keys of all worlds.", keys)
        yield _gauge("keys_bytes", "Bytes of all keys and values.", nbytes)
        yield _counter("requests", "Requests of members, by kind and outcome.", metrics.requests, "kind", "outcome")
        yield _histogram("request_seconds", "From a member's request to its answer, waiting included.", metrics.seconds, "kind")
        yield _counter("http_requests", "HTTP requests, by route and status.", metrics.http_requests, "route", "status")
        yield _histogram("http_request_seconds", "From an HTTP request to its answer.", metrics.http_seconds, "route")
        yield _counter("refused", "Requests and connections refused, by reason.", metrics.refused, "reason")
        yield _counter("heartbeats", "Heartbeats of members.", Counter({(): metrics.beats}))
        yield _counter("events", "What happened to jobs and members.", metrics.events, "event")


def _gauge(name: str, text: str, values: int | Counter[str], *labels: str) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    if not isinstance(values, Counter):
        return GaugeMetricFamily(_PREFIX + name, text, value=values)
    family = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
    for label, value in sorted(values.items()):
        family.add_metric([label], value)
    return family


def _counter(name: str, text: str, values: Counter[Any], *labels: str) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(_PREFIX + name, text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric([key] if isinstance(key, str) else list(key), value)
    return family


def _histogram(name: str, text: str, values: dict[str, _Histogram], *labels: str) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(_PREFIX + name, text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric([key], value.buckets(), value.total)
    return family
