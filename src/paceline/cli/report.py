"""The verb that makes a page of runs: report."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.output import parser_for
from paceline.errors import UserError

DESCRIPTION = """One page that shows a run, or several beside each other; one file, which opens offline.

  paceline report runs/NAME                        report.html
  paceline report runs/* -o comparison.html        a table, curves, scaling, what differs
  paceline report runs/sweep                       all runs of a folder

Runs may be finished, going on, killed, simulated, swept or damaged: what can be read is shown, the rest is said."""


def report_verb(arguments: list[str]) -> int:
    parser = parser_for("report", DESCRIPTION, "paceline report RUN... [-o FILE.html]")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders that hold some")
    parser.add_argument(
        "-o", "--output", default="report.html", metavar="FILE", help="where the page goes [report.html]"
    )
    parsed = parser.parse_strictly(arguments)
    from paceline.analysis.listing import run_folders
    from paceline.reports.html import render
    from paceline.reports.report_data import RunReader
    from paceline.runs.folder import write_atomically

    output = Path(parsed.output)
    if output.is_dir():
        raise UserError(f"-o {output} is a folder: give the file that the page goes to, as in -o {output}/report.html")
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
