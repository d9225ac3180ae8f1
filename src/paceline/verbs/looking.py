"""Verbs that look at runs while they go on or lie there: status, list."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path

from paceline.errors import UserError
from paceline.flags import number
from paceline.verbs.cluster import add_proof
from paceline.verbs.ending import parser_for

STATUS_DESCRIPTION = """How a run stands, what each worker does with its time, and who is slow and why.

  paceline status runs/NAME                 running, ended, killed or simulated
  paceline status runs/NAME --watch 2       again every two seconds, until it ends
  paceline status 10.0.0.1:29500            of a run that is served there, with its token"""


def status_verb(arguments: list[str]) -> int:
    parser = parser_for("status", STATUS_DESCRIPTION)
    parser.add_argument("run", metavar="RUN|HOST:PORT", help="a run folder, as in runs/NAME; or where a run is served")
    parser.add_argument("--watch", type=number(float), metavar="SECONDS", help="again and again, until the run ends")
    parser.add_argument("--json", action="store_true", help="print it as JSON; with --watch a line each time")
    add_proof(parser)
    parsed = parser.parse_strictly(arguments)
    if parsed.watch is not None and not 0.0 < parsed.watch < 86400.0:
        raise UserError(f"--watch {parsed.watch:g}: give the seconds between two looks, as in --watch 2")
    from paceline.observing import looking_at
    from paceline.reports.status_table import describe
    from paceline.runs.status import UNDER_WAY
    from paceline.runs.stragglers import stragglers

    with looking_at(parsed.run, parsed.token_file, parsed.tls, parsed.fingerprint, parsed.ca) as look:
        while True:
            found = look()
            if parsed.json:
                row = dataclasses.asdict(found)
                row["stragglers"] = [dataclasses.asdict(one) for one in stragglers(found.workers)]
                text = json.dumps(row, indent=None if parsed.watch is not None else 2)
            else:
                text = describe(found, _width())
            print(_clear() + text if parsed.watch is not None and not parsed.json else text, flush=True)
            if parsed.watch is None or found.status not in UNDER_WAY:
                return 0
            time.sleep(parsed.watch)


def _clear() -> str:
    """On a terminal each look replaces the one before; elsewhere an empty line parts them."""
    return "\x1b[H\x1b[2J" if sys.stdout.isatty() else "\n"


def _width() -> int:
    return max(20, shutil.get_terminal_size((80, 24)).columns)


def list_verb(arguments: list[str]) -> int:
    parser = parser_for("list", "The runs of a folder, newest first.")
    parser.add_argument("folder", nargs="?", default="runs", metavar="DIR", help="where they lie [runs]")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    parsed = parser.parse_strictly(arguments)
    from paceline.reports.tables import run_list
    from paceline.runs.listing import runs_in

    rows = runs_in(Path(parsed.folder))
    print(json.dumps(rows, indent=2) if parsed.json else run_list(rows, parsed.folder))
    return 0
