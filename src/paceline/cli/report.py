"""Verbs that write files about runs: report, export, trace and landscape."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.cli.arguments import Parser, add_trust, require_trust
from paceline.config import is_url
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.reports.status_table import MAX_LETTERS
from paceline.system.strict_json import to_json
from paceline.system.terminal import printable

DESCRIPTION = """Write an HTML page about one run, or several side by side; it needs no network.

  paceline report runs/NAME                        report.html
  paceline report runs/* -o comparison.html        table, curves, scaling, settings that differ
  paceline report runs/sweep                       all runs of a folder

A run may be finished, running, killed, simulated or damaged: the page shows what can be read."""


def report_verb(arguments: list[str]) -> int:
    parser = Parser("report", DESCRIPTION, "paceline report RUN... [-o FILE.html]")
    parser.add("runs", "run folders, or folders of runs", nargs="+", metavar="RUN")
    parser.add("-o/--output", "file of the page [report.html]", default="report.html", metavar="FILE")
    parsed = parser.parse_strictly(arguments)
    from paceline.analysis.listing import run_folders
    from paceline.reports.html import render
    from paceline.reports.report_data import RunReader
    from paceline.runs.durable_files import write_atomically

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
    sharing: dict[str, list[str]] = {}  # the runs of each note
    for digest in digests:
        for note in digest["notes"]:
            sharing.setdefault(note, []).append(digest["name"])
    notes = [f"{' and '.join(of) if len(of) < 3 else f'{len(of)} runs'}: {note}" for note, of in sharing.items()]
    lines = [*others, *notes, f"{output}: {runs}, {len(page) / 1e6:.1f} MB"]
    print("\n".join(printable(line, MAX_LETTERS) for line in lines))
    return 0


EXPORT_DESCRIPTION = """Send the metrics of runs to a tracker, from their folders, also during training.

  paceline export runs --to tensorboard     then: tensorboard --logdir runs
  paceline export runs/NAME --to csv        metrics.csv in the run's folder
  paceline export runs/NAME --to mine.py:Tracker --follow
  paceline export runs/NAME --to s3://BUCKET/runs    copy the whole run folder"""
TRACE_DESCRIPTION = """Write the timeline of a run for https://ui.perfetto.dev: the work of each worker, and updates.

  paceline trace runs/NAME                          trace.json.gz in the run's folder
  paceline trace runs/NAME --from 10 --to 12 -o part.json"""


def export_verb(arguments: list[str]) -> int:
    parser = Parser("export", EXPORT_DESCRIPTION, "paceline export RUN... --to NAME [--follow]")
    parser.add("runs", "run folders, or folders of runs", nargs="+", metavar="RUN")
    to = "tracker: csv, tensorboard, mlflow, wandb, otel or MODULE:CLASS; or the URL of a store, for the folder itself"
    parser.add("--to", to, required=True, metavar="NAME")
    parser.add("--follow", "keep sending until the run ends", action="store_true")
    parsed = parser.parse_strictly(arguments)
    from paceline.analysis.listing import run_folders
    from paceline.runs.folder import RunFolder
    from paceline.settings.imports import check_tracker
    from paceline.tracking.feed import feed
    from paceline.tracking.registry import make_tracker

    paths, others = run_folders([Path(run) for run in parsed.runs])
    for line in others:
        print(f"paceline: {line}", file=sys.stderr)
    if is_url(parsed.to):
        return _export_to_store(paths, parsed)
    check_tracker(parsed.to)
    if parsed.follow and len(paths) > 1:
        raise UserError(f"--follow takes one run at a time, got {len(paths)}: leave out the others")
    code = 0
    for folder in map(RunFolder, paths):

        def goes_on(folder: RunFolder = folder) -> bool:
            return parsed.follow and not folder.result_file.exists() and folder.is_locked()

        def note(text: str, folder: RunFolder = folder) -> None:
            where = "" if str(folder.path) in text else f"{folder.path}: "
            print(printable(f"paceline: {where}{text}", MAX_LETTERS), file=sys.stderr)

        try:
            num_rows = feed(folder, parsed.to, make_tracker(parsed.to), goes_on, note)
        except UserError as error:  # a damaged run does not keep the others from their tracker
            note(str(error))
            code = error.exit_code
            continue
        print(printable(f"{folder.path}: {num_rows} rows to {parsed.to}", MAX_LETTERS), flush=True)
    return code


def _export_to_store(paths: list[Path], parsed: argparse.Namespace) -> int:
    """Copy run folders to a store, also those of which a part is there."""
    from paceline.object_store.mirroring import copy_to_store
    from paceline.runs.folder import RunFolder
    from paceline.settings.imports import check_mirror

    check_mirror(parsed.to)
    if parsed.follow:
        raise UserError(f"--follow is for trackers: 'paceline train --mirror {parsed.to}' copies a run while it trains")
    with Console() as console:
        for folder in map(RunFolder.open, paths):
            with folder.locked():
                url = copy_to_store(folder, parsed.to, console.report)
            console.note(printable(f"{folder.path}: copied to {url}", MAX_LETTERS))
    return 0


def trace_verb(arguments: list[str]) -> int:
    parser = Parser("trace", TRACE_DESCRIPTION, "paceline trace RUN [-o FILE] [flags]")
    parser.add("run", "a run folder, as in runs/NAME", metavar="RUN")
    parser.add("-o/--output", "file of the trace, .json or .json.gz [RUN/trace.json.gz]", metavar="FILE")
    parser.add("--from", "begin at this second of training", dest="begin", type=float, metavar="S")
    parser.add("--to", "end at this second of training", dest="end", type=float, metavar="S")
    pushes = "maximum number of pushes to draw; beyond it, several pushes become one span [30000]"
    parser.add("--pushes", pushes, type=int, metavar="N")
    parsed = parser.parse_strictly(arguments)
    from paceline.reports.chrome_trace import MAX_PUSHES, TraceWindow, write_trace

    end = float("inf") if parsed.end is None else parsed.end
    part = TraceWindow(parsed.begin or 0.0, end, parsed.pushes or MAX_PUSHES)
    if not part.begin < part.end:
        raise UserError(f"--from {part.begin:g} --to {part.end:g}: give a second of training and a later one")
    if parsed.pushes is not None and parsed.pushes < 1:
        raise UserError(f"--pushes must be at least 1, got {parsed.pushes}")
    output = Path(parsed.output) if parsed.output is not None else Path(parsed.run) / "trace.json.gz"
    num_events, notes = write_trace(Path(parsed.run), output, part)
    lines = [f"{output}: {num_events:,} events; open it at https://ui.perfetto.dev", *notes]
    print("\n".join(printable(line, MAX_LETTERS) for line in lines))
    return 0


LANDSCAPE_DESCRIPTION = """Draw the path of training on the loss landscape, in the plane nearest to its snapshots.

  paceline train --strategy sync --snapshots 4 --name a
  paceline landscape runs/a
  paceline landscape runs/a runs/b --grid 61 --samples 5000 --device cuda -o picture

Writes landscape.png, landscape.csv (the grid) and landscape.json (the paths, and how well the plane fits them)."""
MAX_POINTS = 1001


def landscape_verb(arguments: list[str]) -> int:
    parser = Parser("landscape", LANDSCAPE_DESCRIPTION, "paceline landscape RUN... [flags]")
    parser.add("runs", "run folders, trained with --snapshots", nargs="+", metavar="RUN")
    parser.add("--grid", "compute the loss at N x N points around the paths [41]", type=int, default=41, metavar="N")
    parser.add("--margin", "margin around the paths, as a share of their extent [0.25]", type=float, default=0.25)
    parser.add_choice("--on", ("train", "test"), "data to compute the loss on [train]", default="train")
    parser.add("--samples", "number of samples to compute the loss on [1000]", type=int, default=1000, metavar="N")
    parser.add_choice("--device", ("cpu", "cuda"), "device that computes the losses [cpu]", default="cpu")
    parser.add("-o/--output", "folder for the files [landscape]", default="landscape", metavar="DIR")
    add_trust(parser)
    parser.add("--json", "print landscape.json on standard output", action="store_true")
    parsed = parser.parse_strictly(arguments)
    _check(parsed)
    for run in parsed.runs:
        require_trust(parsed, run)
    from paceline.studies.landscape.figure import draw
    from paceline.studies.landscape.paths import open_runs
    from paceline.studies.landscape.survey import LandscapeView, summary, survey

    runs = open_runs([Path(run) for run in parsed.runs])
    folder = Path(parsed.output)
    _make_writable(folder)
    with Console() as console:
        view = LandscapeView(parsed.grid, parsed.margin, parsed.on, parsed.samples, parsed.device)
        found = survey(runs, view, console)
    print("\n".join(summary(found.facts)), file=sys.stderr if parsed.json else sys.stdout)
    try:
        found.save(folder)
        draw(found.facts, found.x, found.y, found.losses.tolist(), folder / "landscape.png")
    except OSError as error:
        raise UserError(f"--output {folder} cannot be written: {error.strerror}") from None
    files = f"{folder}/landscape.png, {folder}/landscape.csv, {folder}/landscape.json"
    print(to_json(found.facts, indent=1) if parsed.json else files)
    return 0


def _check(parsed: argparse.Namespace) -> None:
    if not 2 <= parsed.grid <= MAX_POINTS:
        raise UserError(f"--grid {parsed.grid}: give a number of points from 2 to {MAX_POINTS}, as in --grid 41")
    if not 0.0 <= parsed.margin <= 100.0:
        raise UserError(f"--margin {parsed.margin:g}: give a number from 0 to 100, as in --margin 0.25")
    if parsed.samples < 1:
        raise UserError(f"--samples {parsed.samples}: give at least 1, as in --samples 1000")


def _make_writable(folder: Path) -> None:
    """Create the output folder and check, before anything is computed, that it can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".landscape.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--output {folder} cannot be written: {error.strerror}; give another folder") from None
