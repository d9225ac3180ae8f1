"""The tracker for OpenTelemetry: metrics of the run and its workers, and the run as one span, sent by OTLP over HTTP.

Where to, with which headers and how often is said by the standard OTEL_* variables.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.analysis.status import PARTS
from paceline.tracking.tracker import TEXT_EVENTS, fields_text, final_scalars, scalars

ENDPOINT, DEFAULT_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318"
EXPORT_MILLISECONDS = 5000.0  # between two exports of metrics, unless a variable says otherwise
EXPORT_SECONDS = 5.0  # for one export, unless a variable says otherwise: the last two must end within 15 s
MAX_EVENTS = 1000  # of the span, unless a variable says otherwise; the oldest are dropped
MAX_WORKERS = 64  # largest run with metrics of each worker
SUMS = {
    "updates": ("paceline.updates", "{update}"),
    "samples": ("paceline.samples", "{sample}"),
    "bytes_pushed": ("paceline.bytes.pushed", "By"),
    "bytes_pulled": ("paceline.bytes.pulled", "By"),
    "now": ("paceline.training.time", "s"),
}
"""Fields of rows that only grow, unless a resume takes back updates: the counter of each, and its unit."""


class OpenTelemetry:
    """Sets gauges to the latest values, adds to counters, and ends one span with the events of the run."""

    def started(self, settings: dict[str, Any], folder: Path) -> None:
        self._folder, self._began = folder, (folder / "config.toml").stat().st_mtime
        self._attributes = {"run": folder.name, "strategy": str(settings["strategy"])}
        self._meter, tracer, self._deliver = self._connect()
        self._instruments: dict[str, Any] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        told = {f"paceline.{name}": value for name, value in settings.items() if value is not None}
        start = self._nanoseconds(0.0)
        self._span = tracer.start_span("paceline run", attributes={**told, **self._attributes}, start_time=start)

    def row(self, kind: str, fields: dict[str, Any]) -> None:
        for field, (name, unit) in SUMS.items():
            if fields.get(field) is not None:
                self._count(name, unit, fields[field])
        for name, value in scalars(kind, fields).items():
            if name.partition("/")[2] not in SUMS:
                self._gauge(f"paceline.{name.replace('/', '.').removeprefix('progress.')}", value)
        if kind == "workers" and len(fields.get("worker", ())) <= MAX_WORKERS:
            self._of_workers(fields)
        if kind == "worker_lost":
            self._add("paceline.workers.lost", "{worker}", 1, worker=str(fields["worker"]))
        if kind in TEXT_EVENTS or kind == "evaluation":
            about = {name: value for name, value in fields.items() if isinstance(value, str | int | float)}
            self._span.add_event(kind, {**about, "text": fields_text(fields)}, self._nanoseconds(fields["now"]))

    def finished(self, result: dict[str, Any] | None) -> None:
        ended = self._folder / "result.json"
        end = int(ended.stat().st_mtime * 1e9) if result is not None and ended.exists() else None
        for name, value in final_scalars(result or {}).items():
            self._gauge(f"paceline.{name.replace('/', '.')}", value)
            self._span.set_attribute(f"paceline.{name.replace('/', '.')}", value)
        status = str(result["status"]) if result is not None else "killed"
        self._span.set_attribute("paceline.status", status)
        self._deliver(self._span, status == "finished", (result or {}).get("reason") or status, end)

    def _of_workers(self, fields: dict[str, Any]) -> None:
        """Each worker's pushes, the time of its parts, and its latest step."""
        for place, number in enumerate(fields["worker"]):
            worker = {"worker": str(number)}
            self._count("paceline.worker.pushes", "{push}", fields["pushes"][place], **worker)
            for part in PARTS:
                if part in fields:
                    self._count("paceline.worker.time", "s", fields[part][place], **worker, part=part)
            for field, unit in (("step", "s"), ("staleness", "{update}")):
                if field in fields and fields[field][place] is not None:
                    self._gauge(f"paceline.worker.{field}", fields[field][place], unit, **worker)

    def _gauge(self, name: str, value: float, unit: str = "1", **labels: str) -> None:
        if name not in self._instruments:
            self._instruments[name] = self._meter.create_gauge(name, unit)
        self._instruments[name].set(value, {**self._attributes, **labels})

    def _count(self, name: str, unit: str, value: float, **labels: str) -> None:
        """Add what a sum has grown by; a sum that has shrunk (a resume took back updates) adds nothing."""
        key = name, *labels.values()
        before, self._sums[key] = self._sums.get(key, 0), value
        if value > before:
            self._add(name, unit, value - before, **labels)

    def _add(self, name: str, unit: str, amount: float, **labels: str) -> None:
        if name not in self._instruments:
            self._instruments[name] = self._meter.create_counter(name, unit)
        self._instruments[name].add(amount, {**self._attributes, **labels})

    def _nanoseconds(self, now: float) -> int:
        return int((self._began + now) * 1e9)

    def _connect(self) -> tuple[Any, Any, Callable[..., None]]:
        """Return a meter, a tracer, and what ends the span and delivers all that is left."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.trace import Status, StatusCode

        named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create({} if named else {"service.name": "paceline"})
        given = None if any(name.endswith("_TIMEOUT") and "OTLP" in name for name in os.environ) else EXPORT_SECONDS
        metrics, spans = OTLPMetricExporter(timeout=given), OTLPSpanExporter(timeout=given)
        arrived = {"metrics": _watched(metrics), "the span": _watched(spans)}
        pause = None if "OTEL_METRIC_EXPORT_INTERVAL" in os.environ else EXPORT_MILLISECONDS
        reader = PeriodicExportingMetricReader(metrics, export_interval_millis=pause)
        limits = SpanLimits(max_events=None if "OTEL_SPAN_EVENT_COUNT_LIMIT" in os.environ else MAX_EVENTS)
        meters = MeterProvider([reader], resource, shutdown_on_exit=False)
        tracers = TracerProvider(resource=resource, span_limits=limits, shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(spans))

        def deliver(span: Any, is_good: bool, reason: str, end: int | None) -> None:
            span.set_status(Status(StatusCode.OK) if is_good else Status(StatusCode.ERROR, reason))
            span.end(end)
            meters.shutdown()
            tracers.shutdown()
            if lost := [what for what, came in arrived.items() if not came()]:
                where = os.environ.get(ENDPOINT) or f"not set, so {DEFAULT_ENDPOINT}"
                raise ConnectionError(f"{' and '.join(lost)} did not arrive; {ENDPOINT} is {where}")

        return meters.get_meter("paceline"), tracers.get_tracer("paceline"), deliver


def _watched(exporter: Any) -> Callable[[], bool]:
    """Note the outcome of each export, which the SDK only logs; returns whether the last one arrived."""
    export, outcomes = exporter.export, [False]

    def watched(*arguments: Any, **named: Any) -> Any:
        outcomes[0] = False
        result = export(*arguments, **named)
        outcomes[0] = result.name == "SUCCESS"
        return result

    exporter.export = watched
    return lambda: outcomes[0]
