"""Verbs that hand a run's folder to other programs: export, trace."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.cli.arguments import number
from paceline.cli.output import parser_for
from paceline.errors import UserError

EXPORT_DESCRIPTION = """Tell a tracker of runs that are over, or of one that goes on, from their folders.

  paceline export runs --to tensorboard     then: tensorboard --logdir runs
  paceline export runs/NAME --to csv        metrics.csv in the run's folder
  paceline export runs/NAME --to mine.py:Tracker --follow"""

TRACE_DESCRIPTION = """A run as a trace for https://ui.perfetto.dev: what every worker did when, and each update.

  paceline trace runs/NAME                          trace.json.gz in the run's folder
  paceline trace runs/NAME --from 10 --to 12 -o part.json"""


def export_verb(arguments: list[str]) -> int:
    parser = parser_for("export", EXPORT_DESCRIPTION, "paceline export RUN... --to NAME [--follow]")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders that hold some")
    parser.add_argument("--to", required=True, metavar="NAME", help="csv, tensorboard, mlflow, wandb or MODULE:CLASS")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")
    parsed = parser.parse_strictly(arguments)
    from paceline.analysis.listing import run_folders
    from paceline.runs.folder import RunFolder
    from paceline.tracking.feed import feed
    from paceline.tracking.registry import check_tracker, make_tracker

    check_tracker(parsed.to)
    paths, others = run_folders([Path(run) for run in parsed.runs])
    for line in others:
        print(f"paceline: {line}", file=sys.stderr)
    folders = [RunFolder(path) for path in paths]
    if parsed.follow and len(folders) > 1:
        raise UserError(f"--follow takes one run at a time, got {len(folders)}: leave out the others")
    for folder in folders:

        def goes_on(folder: RunFolder = folder) -> bool:
            return parsed.follow and not folder.result_file.exists() and folder.is_locked()

        fed = feed(folder, parsed.to, make_tracker(parsed.to), goes_on)
        print(f"{folder.path}: {fed} rows to {parsed.to}", flush=True)
    return 0


def trace_verb(arguments: list[str]) -> int:
    parser = parser_for("trace", TRACE_DESCRIPTION, "paceline trace RUN [-o FILE] [flags]")
    parser.add_argument("run", metavar="RUN", help="a run folder, as in runs/NAME")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to, .json or .json.gz [RUN/trace.json.gz]")
    parser.add_argument("--from", dest="begin", type=number(float), metavar="S", help="from this second of training on")
    parser.add_argument("--to", dest="end", type=number(float), metavar="S", help="up to this one")
    parser.add_argument(
        "--pushes", type=number(int), metavar="N",
        help="pushes drawn one by one; of more, several become one span [30000]",
    )  # fmt: skip
    parsed = parser.parse_strictly(arguments)
    from paceline.reports.chrome_trace import MOST_PUSHES, Part, write_trace

    part = Part(parsed.begin or 0.0, float("inf") if parsed.end is None else parsed.end, parsed.pushes or MOST_PUSHES)
    if not part.begin < part.end:
        raise UserError(f"--from {part.begin:g} --to {part.end:g}: give a second of training and a later one")
    if parsed.pushes is not None and parsed.pushes < 1:
        raise UserError(f"--pushes must be at least 1, got {parsed.pushes}")
    output = Path(parsed.output) if parsed.output is not None else Path(parsed.run) / "trace.json.gz"
    num_events, notes = write_trace(Path(parsed.run), output, part)
    print(f"{output}: {num_events:,} events; open it at https://ui.perfetto.dev")
    for note in notes:
        print(note)
    return 0
