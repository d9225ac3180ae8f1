"""`--track mlflow`: a run of MLflow, where MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.tracking.tracker import final_scalars, scalars


class MLflow:
    """Settings as parameters, numbers as metrics by update, how it ended as the status."""

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
