"""The built-in trackers but OpenTelemetry: CSV file, TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from paceline.tracking.tracker import AXES, TEXT_EVENTS, fields_text, final_scalars, reported, scalars

SCORES = tuple(f"{part}_{what}" for part in ("test", "validation", "train") for what in ("accuracy", "loss"))
FIGURES = ("loss", "rate", "staleness", "live", "lr", *SCORES, "worker", "metric", "value")


class CsvFile:
    """Writes progress, evaluations and reported metrics to `metrics.csv`; the shortest example of a tracker."""

    def started(self, settings: dict[str, Any], folder: Path) -> None:
        self._file = (folder / "metrics.csv").open("w", newline="", buffering=1)
        self._lines = csv.DictWriter(self._file, ("kind", *AXES, *FIGURES), extrasaction="ignore")
        self._lines.writeheader()

    def row(self, kind: str, fields: dict[str, Any]) -> None:
        if kind in ("progress", "evaluation"):
            self._lines.writerow({"kind": kind, **fields})
        for name, value in reported(fields).items() if kind == "reported" else ():
            self._lines.writerow({"kind": kind, **fields, "metric": name, "value": value})

    def finished(self, result: dict[str, Any] | None) -> None:
        self._file.close()


class TensorBoard:
    """Writes scalars by update, and events and settings as text; replaces files of an earlier tracker."""

    def started(self, settings: dict[str, Any], folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._tensor = event_pb2, summary_pb2, tensor_pb2
        home = folder / "tensorboard"
        for old in home.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = EventFileWriter(str(home), flush_secs=5)
        self._began, self._last = (folder / "config.toml").stat().st_mtime, 0
        table = "\n".join(f"| {name} | {value} |" for name, value in settings.items() if value is not None)
        self._add(0, 0.0, [self._text("settings", f"| setting | value |\n|---|---|\n{table}")])

    def row(self, kind: str, fields: dict[str, Any]) -> None:
        step, now = fields["updates"], fields["now"]
        if kind == "run_resumed" and step < self._last:  # later rows were undone
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._writer.add_event(self._event.Event(wall_time=self._began + now, step=step, session_log=start))
        self._last = step
        values = [self._scalar(name, value) for name, value in scalars(kind, fields).items()]
        if kind in TEXT_EVENTS:
            values.append(self._text(f"events/{kind}", fields_text(fields) or kind))
        self._add(step, now, values)

    def finished(self, result: dict[str, Any] | None) -> None:
        if result is not None:
            values = [self._scalar(name, value) for name, value in final_scalars(result).items()]
            self._add(result.get("updates", 0), result.get("train_seconds", 0.0), values)
        self._writer.close()

    def _add(self, step: int, now: float, values: list[Any]) -> None:
        if values:
            summary = self._summary.Summary(value=values)
            self._writer.add_event(self._event.Event(wall_time=self._began + now, step=step, summary=summary))

    def _scalar(self, name: str, value: float) -> Any:
        return self._summary.Summary.Value(tag=name, simple_value=value)

    def _text(self, name: str, text: str) -> Any:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        tensor = self._tensor.TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        metadata = self._summary.SummaryMetadata(plugin_data=plugin)
        return self._summary.Summary.Value(tag=f"{name}/text_summary", metadata=metadata, tensor=tensor)


class MLflow:
    """Logs settings as parameters, numbers as metrics by update, and the final status."""

    def started(self, settings: dict[str, Any], folder: Path) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params({name: value for name, value in settings.items() if value is not None})

    def row(self, kind: str, fields: dict[str, Any]) -> None:
        values = scalars(kind, fields)
        if values:
            self._mlflow.log_metrics(values, step=fields["updates"])

    def finished(self, result: dict[str, Any] | None) -> None:
        if result is not None:
            self._mlflow.log_metrics(final_scalars(result), step=result.get("updates", 0))
        done = result is not None and result.get("status") == "finished"
        self._mlflow.end_run("FINISHED" if done else "FAILED")


class Wandb:
    """Logs settings as the config, numbers over updates, and the result as the summary."""

    def started(self, settings: dict[str, Any], folder: Path) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "paceline")
        self._run = wandb.init(project=project, name=folder.name, config=settings, dir=str(folder))
        self._run.define_metric("updates")
        self._run.define_metric("*", step_metric="updates")  # a resumed run may step back; wandb's own step may not

    def row(self, kind: str, fields: dict[str, Any]) -> None:
        values = scalars(kind, fields)
        if values:
            self._run.log({"updates": fields["updates"], "seconds": fields["now"], **values})

    def finished(self, result: dict[str, Any] | None) -> None:
        if result is not None:
            self._run.summary.update(final_scalars(result))
        self._run.finish(exit_code=0 if result is not None and result.get("status") == "finished" else 1)
