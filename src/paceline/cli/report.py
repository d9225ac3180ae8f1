"""Verbs that write files about runs: report, export, trace and landscape."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from paceline.cli.arguments import Parser, number
from paceline.errors import UserError
from paceline.reports.console import Console

DESCRIPTION = """Write an HTML page about one run, or several side by side; it needs no network.

  paceline report runs/NAME                        report.html
  paceline report runs/* -o comparison.html        table, curves, scaling, settings that differ
  paceline report runs/sweep                       all runs of a folder

A run may be finished, running, killed, simulated or damaged: the page shows what can be read."""


def report_verb(arguments: list[str]) -> int:
    parser = Parser("report", DESCRIPTION, "paceline report RUN... [-o FILE.html]")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders of runs")
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="file of the page [report.html]")
    parsed = parser.parse_strictly(arguments)
    from paceline.analysis.listing import run_folders
    from paceline.reports.html import render
    from paceline.reports.report_data import RunReader
    from paceline.runs.folder import write_atomically

    output = Path(parsed.output)
    if output.is_dir():
        raise UserError(f"-o {output} is a folder: give a file for the page, as in -o {output}/report.html")
    paths, others = run_folders([Path(run) for run in parsed.runs])
    digests = []
    for path in paths:
        reader = RunReader(path)
        reader.refresh()
        digests.append(reader.digest())
    page = render(digests).encode()
    try:
        write_atomically(output, page)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}; give another -o FILE.html") from None
    runs = "1 run" if len(digests) == 1 else f"{len(digests)} runs"
    notes = [f"{digest['name']}: {note}" for digest in digests for note in digest["notes"]]
    print("\n".join([*others, *notes, f"{output}: {runs}, {len(page) / 1e6:.1f} MB"]))
    return 0


EXPORT_DESCRIPTION = """Send the metrics of runs to a tracker, from their folders, also during training.

  paceline export runs --to tensorboard     then: tensorboard --logdir runs
  paceline export runs/NAME --to csv        metrics.csv in the run's folder
  paceline export runs/NAME --to mine.py:Tracker --follow"""


TRACE_DESCRIPTION = """Write the timeline of a run for https://ui.perfetto.dev: the work of each worker, and updates.

  paceline trace runs/NAME                          trace.json.gz in the run's folder
  paceline trace runs/NAME --from 10 --to 12 -o part.json"""


def export_verb(arguments: list[str]) -> int:
    parser = Parser("export", EXPORT_DESCRIPTION, "paceline export RUN... --to NAME [--follow]")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders of runs")
    parser.add_argument(
        "--to", required=True, metavar="NAME", help="tracker: csv, tensorboard, mlflow, wandb or MODULE:CLASS"
    )
    parser.add_argument("--follow", action="store_true", help="keep sending until the run ends")
    parsed = parser.parse_strictly(arguments)
    from paceline.analysis.listing import run_folders
    from paceline.runs.folder import RunFolder
    from paceline.settings.imports import check_tracker
    from paceline.tracking.feed import feed
    from paceline.tracking.registry import make_tracker

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
    parser = Parser("trace", TRACE_DESCRIPTION, "paceline trace RUN [-o FILE] [flags]")
    parser.add_argument("run", metavar="RUN", help="a run folder, as in runs/NAME")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="file of the trace, .json or .json.gz [RUN/trace.json.gz]"
    )
    parser.add_argument(
        "--from", dest="begin", type=number(float), metavar="S", help="begin at this second of training"
    )
    parser.add_argument("--to", dest="end", type=number(float), metavar="S", help="end at this second of training")
    parser.add_argument(
        "--pushes", type=number(int), metavar="N",
        help="maximum number of pushes to draw; beyond it, several pushes become one span [30000]",
    )  # fmt: skip
    parsed = parser.parse_strictly(arguments)
    from paceline.reports.chrome_trace import MAX_PUSHES, TraceWindow, write_trace

    part = TraceWindow(
        parsed.begin or 0.0, float("inf") if parsed.end is None else parsed.end, parsed.pushes or MAX_PUSHES
    )
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


LANDSCAPE_DESCRIPTION = """Draw the path of training on the loss landscape, in the plane nearest to its snapshots.

  paceline train --strategy sync --snapshots 4 --name a
  paceline landscape runs/a
  paceline landscape runs/a runs/b --grid 61 --samples 5000 --device cuda -o picture

Writes landscape.png, landscape.csv (the grid) and landscape.json (the paths, and how well the plane fits them)."""


MAX_PLACES = 1001


def landscape_verb(arguments: list[str]) -> int:
    parser = Parser("landscape", LANDSCAPE_DESCRIPTION, "paceline landscape RUN... [flags]")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, trained with --snapshots")
    parser.add_argument(
        "--grid",
        type=number(int),
        default=41,
        metavar="N",
        help="compute the loss at N x N points around the paths [41]",
    )
    parser.add_argument(
        "--margin", type=number(float), default=0.25, help="margin around the paths, as a share of their extent [0.25]"
    )
    parser.add_choice("--on", ("train", "test"), default="train", help="data to compute the loss on [train]")
    parser.add_argument(
        "--samples", type=number(int), default=1000, metavar="N", help="number of samples to compute the loss on [1000]"
    )
    parser.add_choice("--device", ("cpu", "cuda"), default="cpu", help="device that computes the losses [cpu]")
    parser.add_argument("-o", "--output", default="landscape", metavar="DIR", help="folder for the files [landscape]")
    parser.add_argument("--json", action="store_true", help="print landscape.json on standard output")
    parsed = parser.parse_strictly(arguments)
    _check(parsed)
    from paceline.studies.landscape.figure import draw
    from paceline.studies.landscape.paths import open_runs
    from paceline.studies.landscape.survey import LandscapeView, summary, survey

    runs = open_runs([Path(run) for run in parsed.runs])
    folder = _made(Path(parsed.output))
    with Console() as console:
        found = survey(
            runs, LandscapeView(parsed.grid, parsed.margin, parsed.on, parsed.samples, parsed.device), console
        )
    print("\n".join(summary(found.facts)), file=sys.stderr if parsed.json else sys.stdout)
    try:
        found.save(folder)
        draw(found.facts, found.x, found.y, found.losses.tolist(), folder / "landscape.png")
    except OSError as error:
        raise UserError(f"--output {folder} cannot be written: {error.strerror}") from None
    files = f"{folder}/landscape.png, {folder}/landscape.csv, {folder}/landscape.json"
    print(json.dumps(found.facts, indent=1) if parsed.json else files)
    return 0


def _check(parsed: argparse.Namespace) -> None:
    if not 2 <= parsed.grid <= MAX_PLACES:
        raise UserError(f"--grid {parsed.grid}: give a number of places from 2 to {MAX_PLACES}, as in --grid 41")
    if not 0.0 <= parsed.margin <= 100.0:
        raise UserError(f"--margin {parsed.margin:g}: give a number from 0 to 100, as in --margin 0.25")
    if parsed.samples < 1:
        raise UserError(f"--samples {parsed.samples}: at least one sample makes a loss")


def _made(folder: Path) -> Path:
    """Make the output folder, and check that it can be written before anything is computed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".landscape.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--output {folder} cannot be written: {error.strerror}; give another folder") from None
    return folder
