"""Verbs that hand a run's folder to other programs: export."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import UserError
from paceline.verbs.ending import parser_for

EXPORT_DESCRIPTION = """Tell a tracker of runs that are over, or of one that goes on, from their folders.

  paceline export runs/* --to tensorboard   then: tensorboard --logdir runs
  paceline export runs/NAME --to csv        metrics.csv in the run's folder
  paceline export runs/NAME --to mine.py:Tracker --follow"""


def export_verb(arguments: list[str]) -> int:
    parser = parser_for("export", EXPORT_DESCRIPTION, "paceline export RUN... --to NAME [--follow]")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, as in runs/NAME")
    parser.add_argument("--to", required=True, metavar="NAME", help="csv, tensorboard, mlflow, wandb or MODULE:CLASS")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")
    parsed = parser.parse_strictly(arguments)
    from paceline.runs.folder import RunFolder
    from paceline.tracking.feeding import feed
    from paceline.tracking.names import check_tracker, make_tracker

    check_tracker(parsed.to)
    folders = [RunFolder.open(Path(run)) for run in parsed.runs]
    if parsed.follow and len(folders) > 1:
        raise UserError(f"--follow takes one run at a time, got {len(folders)}: leave out the others")
    for folder in folders:

        def goes_on(folder: RunFolder = folder) -> bool:
            return parsed.follow and not folder.result_file.exists() and folder.is_locked()

        fed = feed(folder, parsed.to, make_tracker(parsed.to), goes_on)
        print(f"{folder.path}: {fed} rows to {parsed.to}", flush=True)
    return 0
