"""OpenTelemetry: which instruments the rows of a run become, and what arrives at a collector."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunConfig
from paceline.errors import RunFailed
from paceline.runs.events import EventLog
from paceline.runs.folder import RunFolder
from paceline.tracking.feed import feed
from paceline.tracking.otel import ENDPOINT, OpenTelemetry

RESULT = {"status": "finished", "updates": 24, "samples": 768, "train_seconds": 3.0, "test_accuracy": 55.0, "lr": 0.1}
RUN = {"run": "run", "strategy": "sync"}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(RunConfig(runs=str(tmp_path), name="run", workers=2, strategy="sync", lr=0.1))
    with EventLog(made.events_file) as events:
        events.write("run_started", 0.0, workers=2, strategy="sync", updates=0)
        events.write("progress", 1.0, updates=10, samples=320, loss=2.25, rate=None, bytes_pushed=4000)
        columns = {"worker": [0, 1], "pushes": [5, 6], "computing": [0.5, 0.75], "waiting": [0.5, 0.25]}
        events.write("workers", 2.0, **columns, staleness=[None, 1.5])
        events.write("worker_lost", 2.5, worker=0, pushes=12, live=1)
        events.write("progress", 3.0, updates=20, samples=640, loss=2.0, bytes_pushed=8000)
        events.write("run_resumed", 2.0, updates=15)  # from a checkpoint: five updates were taken back
        events.write("progress", 4.0, updates=22, samples=700, loss=1.5, bytes_pushed=8800)
        events.write("evaluation", 4.0, updates=22, test_accuracy=51.0)
    made.write_result(RESULT)
    return made


class Instrument:
    """A gauge or a counter: what it was set to, or the sum, by its labels."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}

    def set(self, value: float, attributes: dict[str, str]) -> None:
        assert {name: attributes[name] for name in RUN} == RUN
        self.values[tuple(attributes.values())[2:]] = value

    def add(self, amount: float, attributes: dict[str, str]) -> None:
        assert amount > 0  # a counter of OpenTelemetry takes no other
        self.set(self.values.get(tuple(attributes.values())[2:], 0) + amount, attributes)


class Recorder(OpenTelemetry):
    """The tracker with a meter and a span that keep what they are told."""

    def __init__(self) -> None:
        self.kept: dict[str, Instrument] = {}
        self.events: list[str] = []
        self.attributes: dict[str, Any] = {}
        self.end: tuple[Any, ...] = ()

    def _connect(self) -> Any:
        return self, self, lambda span, *end: setattr(self, "end", end)

    def create_gauge(self, name: str, unit: str) -> Instrument:
        return self.kept.setdefault(name, Instrument())

    create_counter = create_gauge

    def start_span(self, name: str, attributes: dict[str, Any], start_time: int) -> Any:
        self.attributes |= attributes
        return self

    def add_event(self, name: str, attributes: dict[str, Any], timestamp: int) -> None:
        self.events.append(name)

    def set_attribute(self, name: str, value: Any) -> None:
        self.attributes[name] = value


def test_rows_become_gauges_counters_and_the_events_of_a_span(folder: RunFolder) -> None:
    tracker = Recorder()
    feed(folder, "otel", tracker)
    values = {name: instrument.values for name, instrument in tracker.kept.items()}
    assert values["paceline.loss"] == {(): 1.5} and values["paceline.evaluation.test_accuracy"] == {(): 51.0}
    assert values["paceline.updates"] == {(): 27}  # 20, and 7 after five were taken back
    assert values["paceline.bytes.pushed"] == {(): 8800}
    assert values["paceline.worker.pushes"] == {("0",): 5, ("1",): 6}
    assert values["paceline.worker.time"][("1", "computing")] == 0.75
    assert values["paceline.worker.staleness"] == {("1",): 1.5}
    assert values["paceline.workers.lost"] == {("0",): 1}
    assert values["paceline.result.test_accuracy"] == {(): 55.0}
    assert tracker.events == ["worker_lost", "run_resumed", "evaluation"]
    assert tracker.attributes["paceline.lr"] == 0.1 and tracker.attributes["paceline.status"] == "finished"
    assert tracker.end[:2] == (True, "finished")


def test_a_killed_run_is_a_span_with_an_error(folder: RunFolder) -> None:
    folder.result_file.unlink()
    tracker = Recorder()
    feed(folder, "otel", tracker)
    assert tracker.end == (False, "killed", None)


@contextmanager
def collector(answer: int = 200) -> Iterator[tuple[str, list[tuple[str, str | None, bytes]]]]:
    """A server that takes what is exported to it."""
    came: list[tuple[str, str | None, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            came.append((self.path, self.headers["x-team"], body))
            self.send_response(answer)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", came
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_collector_gets_metrics_and_the_span(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with collector() as (address, came):
        monkeypatch.setenv(ENDPOINT, address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=ours")
        feed(folder, "otel", OpenTelemetry())
    assert {header for _, header, _ in came} == {"ours"}
    (span,) = [
        span
        for path, _, body in came
        if path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for span in resource.scope_spans[0].spans
    ]
    assert span.name == "paceline run" and span.status.code == span.status.STATUS_CODE_OK
    assert [event.name for event in span.events] == ["worker_lost", "run_resumed", "evaluation"]
    assert span.start_time_unix_nano < span.end_time_unix_nano
    last = ExportMetricsServiceRequest.FromString([body for path, _, body in came if path == "/v1/metrics"][-1])
    (resource,) = last.resource_metrics
    assert [one.value.string_value for one in resource.resource.attributes if one.key == "service.name"] == ["paceline"]
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    (loss,) = metrics["paceline.loss"].gauge.data_points
    assert loss.as_double == 1.5
    assert {one.key: one.value.string_value for one in loss.attributes} == RUN
    (lost,) = metrics["paceline.workers.lost"].sum.data_points
    assert lost.as_int == 1 and metrics["paceline.workers.lost"].sum.is_monotonic
    assert {one.key: one.value.string_value for one in lost.attributes} == {**RUN, "worker": "0"}


def test_a_collector_that_refuses_is_said(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
    with collector(answer=403) as (address, _):
        monkeypatch.setenv(ENDPOINT, address)
        with pytest.raises(RunFailed, match=r"metrics and the span did not arrive; OTEL_EXPORTER_OTLP_ENDPOINT is"):
            feed(folder, "otel", OpenTelemetry())
