"""`--track wandb`: a run of Weights & Biases, project WANDB_PROJECT or `paceline`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.tracking.tracker import final_scalars, scalars


class Wandb:
    """Settings as the config, numbers over updates, the result as the summary."""

    def started(self, settings: dict[str, Any], folder: Path) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "paceline")
        self._run = wandb.init(project=project, name=folder.name, config=settings, dir=str(folder))
        self._run.define_metric("updates")
        self._run.define_metric("*", step_metric="updates")  # a resumed run may step back, which their own step may not

    def row(self, kind: str, fields: dict[str, Any]) -> None:
        values = scalars(kind, fields)
        if values:
            self._run.log({"updates": fields["updates"], "seconds": fields["now"], **values})

    def finished(self, result: dict[str, Any] | None) -> None:
        if result is not None:
            self._run.summary.update(final_scalars(result))
        self._run.finish(exit_code=0 if result is not None and result.get("status") == "finished" else 1)
