"""Verbs that read run folders: status, list, compare."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from paceline.cli.arguments import Parser
from paceline.cli.cluster import add_proof, chosen_tls
from paceline.errors import UserError
from paceline.system.strict_json import to_json
from paceline.system.terminal import UNLIMITED_WIDTH, can_redraw, table_width, terminal_width

STATUS_DESCRIPTION = """Show the state of a run, how each worker spends its time, and which worker is slow and why.

  paceline status runs/NAME             a run that goes on, or has ended
  paceline status runs/NAME --watch 2   every two seconds until it ends
  paceline status 10.0.0.1:29500        the run of a server; needs its token"""
LIST_DESCRIPTION = """List the runs of a folder, newest first, with the state of each; for a damaged run, what is wrong.

  paceline list runs --where status=killed
  paceline list runs --where 'strategy=bounded:*' --sort test_accuracy"""
COMPARE_DESCRIPTION = """Compare runs in one table: the settings that differ, and the results.

  paceline compare runs/one runs/two
  paceline compare runs --where dataset=cifar10 --sort test_accuracy
  paceline compare runs --csv > runs.csv"""


def status_verb(arguments: list[str]) -> int:
    parser = Parser("status", STATUS_DESCRIPTION)
    parser.add("run", "a run folder, as in runs/NAME, or the address of a server", metavar="RUN|HOST:PORT")
    parser.add("--watch", "repeat every this many seconds until the run ends", type=float, metavar="SECONDS")
    parser.add("--json", "print the state as JSON; with --watch one line each time", action="store_true")
    add_proof(parser)
    parsed = parser.parse_strictly(arguments)
    if parsed.watch is not None and not 0.0 < parsed.watch < 86400.0:
        raise UserError(f"--watch {parsed.watch:g}: give the seconds between two looks, as in --watch 2")
    from paceline.analysis.status import UNDER_WAY
    from paceline.analysis.stragglers import stragglers
    from paceline.reports.status_table import format_status
    from paceline.reports.watch.remote import status_reader

    tls = chosen_tls(parsed, "fingerprint", "ca")
    with status_reader(parsed.run, parsed.token_file, tls, parsed.fingerprint, parsed.ca) as look:
        while True:
            found = look()
            if parsed.json:
                row = dataclasses.asdict(found)
                row["stragglers"] = [dataclasses.asdict(one) for one in stragglers(found.workers)]
                text = to_json(row, indent=None if parsed.watch is not None else 2)
            else:
                text = format_status(found, terminal_width())
                if parsed.watch is not None:
                    text = ("\x1b[H\x1b[2J" if can_redraw(sys.stdout) else "\n") + text
            print(text, flush=True)
            if parsed.watch is None or found.status not in UNDER_WAY:
                return 0
            time.sleep(parsed.watch)


def _add_selection(parser: Parser) -> None:
    where = "list only runs with this value, as in strategy=async, 'strategy=bounded:*', 'lr>=0.01'; may be repeated"
    parser.add("--where", where, action="append", default=[], metavar="FIELD=VALUE")
    order = (
        "sort by a setting, a result or a reported metric: accuracies and speeds highest first, others lowest first; "
        "or say it with max:FIELD or min:FIELD"
    )
    parser.add("--sort", order, metavar="FIELD")
    parser.add("--reverse", "reverse the order", action="store_true")
    parser.add("--all", "show all runs, also of a long table", action="store_true")
    parser.add_either(json="print all settings and results as JSON", csv="print all settings and results as CSV")


def _most(parsed: argparse.Namespace) -> int | None:
    """The most runs in a table: all if asked for, or if the output goes to a file or another program."""
    from paceline.reports.run_tables import MAX_RUNS

    return None if parsed.all or table_width() == UNLIMITED_WIDTH else MAX_RUNS


def _choose(found: list[dict[str, Any]], parsed: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the chosen rows in order; if they mix averaged and live weights, say which of the two sorts them."""
    from paceline.analysis.listing import choose, sort_order

    rows = choose(found, parsed.where, parsed.sort, parsed.reverse)
    if parsed.sort is not None and len({row["weights"] for row in rows if row["status"] != "damaged"}) > 1:
        asked, key = parsed.sort.rpartition(":")[2].replace("-", "_"), sort_order(rows, parsed.sort).metric
        if key.endswith(f"_{asked}"):
            print(f"paceline: sorted by {key}, which all of these runs have", file=sys.stderr)
    return rows


def _print_runs(rows: list[dict[str, Any]], parsed: argparse.Namespace, text: str) -> None:
    from paceline.analysis.listing import KEYS, as_texts
    from paceline.reports.tables import as_csv

    if parsed.json:
        print(to_json([{key: row[key] for key in KEYS} for row in rows], indent=2))
    elif parsed.csv:
        print(as_csv([as_texts(row) for row in rows], KEYS), end="")
    else:
        print(text)


def list_verb(arguments: list[str]) -> int:
    parser = Parser("list", LIST_DESCRIPTION)
    parser.add("folder", "folder of runs [runs]", nargs="?", default="runs", metavar="DIR")
    _add_selection(parser)
    parsed = parser.parse_strictly(arguments)
    from paceline.analysis.listing import runs_in
    from paceline.reports.run_tables import no_runs, run_list

    rows = _choose(runs_in(Path(parsed.folder)), parsed)
    text = run_list(rows, table_width(), _most(parsed)) if rows else no_runs(parsed.folder, parsed.where)
    _print_runs(rows, parsed, text)
    return 0


def compare_verb(arguments: list[str]) -> int:
    parser = Parser("compare", COMPARE_DESCRIPTION, "paceline compare RUN|DIR... [flags]")
    parser.add("runs", "run folders, or folders of runs", nargs="+", metavar="RUN")
    _add_selection(parser)
    parsed = parser.parse_strictly(arguments)
    from paceline.analysis.listing import runs_of
    from paceline.reports.run_tables import compare

    found, others = runs_of([Path(run) for run in parsed.runs])
    for line in others:
        print(f"paceline: {line}", file=sys.stderr)
    rows = _choose(found, parsed)
    if not rows:
        raise UserError(f"none of {len(found)} runs fits --where {' --where '.join(parsed.where)}: ask for less")
    _print_runs(rows, parsed, compare(rows, table_width(), _most(parsed)))
    return 0
