"""The verb that shows where training went: `paceline landscape`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from paceline.cli.arguments import number
from paceline.cli.output import parser_for
from paceline.errors import UserError
from paceline.reports.console import Console

DESCRIPTION = """The path of training on the loss landscape: the plane nearest to all snapshots, and the loss on it.

  paceline train --strategy sync --snapshots 4 --name a
  paceline landscape runs/a
  paceline landscape runs/a runs/b --grid 61 --samples 5000 --device cuda -o picture

Writes landscape.png, landscape.csv (the grid) and landscape.json (the paths, and how faithful the picture is)."""
MOST_PLACES = 1001


def landscape_verb(arguments: list[str]) -> int:
    parser = parser_for("landscape", DESCRIPTION, "paceline landscape RUN... [flags]")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, trained with --snapshots")
    parser.add_argument("--grid", type=number(int), default=41, metavar="N", help="N x N places around the paths [41]")
    parser.add_argument("--margin", type=number(float), default=0.25, help="room around them, in their lengths [0.25]")
    parser.add_argument("--on", choices=("train", "test"), default="train", help="which data [train]")
    parser.add_argument("--samples", type=number(int), default=1000, metavar="N", help="how many of it [1000]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where losses are computed [cpu]")
    parser.add_argument("-o", "--output", default="landscape", metavar="DIR", help="where the files go [landscape]")
    parser.add_argument("--json", action="store_true", help="print landscape.json on standard output")
    parsed = parser.parse_strictly(arguments)
    _check(parsed)
    from paceline.studies.landscape.figure import draw
    from paceline.studies.landscape.paths import find_trails
    from paceline.studies.landscape.survey import View, summary, survey

    trails = find_trails([Path(run) for run in parsed.runs])
    folder = _made(Path(parsed.output))
    with Console() as console:
        found = survey(trails, View(parsed.grid, parsed.margin, parsed.on, parsed.samples, parsed.device), console)
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
    if not 2 <= parsed.grid <= MOST_PLACES:
        raise UserError(f"--grid {parsed.grid}: give a number of places from 2 to {MOST_PLACES}, as in --grid 41")
    if not 0.0 <= parsed.margin <= 100.0:
        raise UserError(f"--margin {parsed.margin:g}: give a number from 0 to 100, as in --margin 0.25")
    if parsed.samples < 1:
        raise UserError(f"--samples {parsed.samples}: at least one sample makes a loss")


def _made(folder: Path) -> Path:
    """The output folder, found not writable before anything is computed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".landscape.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--output {folder} cannot be written: {error.strerror}; give another folder") from None
    return folder
