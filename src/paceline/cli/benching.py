"""`paceline bench`: what this machine makes of more workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paceline.cli.arguments import add_settings, config_from, number
from paceline.cli.output import parser_for
from paceline.cli.studies import write
from paceline.config import SIMULATED_ONLY
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.system.terminal import table_width

DESCRIPTION = """The same run on 1, 2, 4, ... workers: samples/s, efficiency, and where the time went.

  paceline bench scaling --strategy sync --model cnn --workers 1,2
  paceline bench scaling --kind strong --batch-size 128 --strategy async --repeats 3

Strong: --batch-size is shared by all workers. Weak: it is each worker's own. --steps are those of each worker [200].
Flags of 'paceline train' are handed on, but for --epochs. The same command goes on where it was stopped."""


def bench_verb(arguments: list[str]) -> int:
    parser = parser_for("bench", DESCRIPTION, "paceline bench scaling [flags]")
    parser.add_argument("benchmark", choices=("scaling",), help="what to measure")
    parser.add_argument("--kind", choices=("strong", "weak"), default="weak", help="how the batch grows [weak]")
    parser.add_argument("--workers", dest="counts", metavar="N,N,...", help="counts to try (default: up to the cores)")
    parser.add_argument("--repeats", type=number(int), default=1, help="runs of each count; the median counts [1]")
    parser.add_argument("--json", action="store_true", help="print the table as JSON on standard output, last")
    add_settings(parser, left_out=(*SIMULATED_ONLY, "workers", "epochs", "epoch_mode", "shard_weights", "score"))
    parsed = parser.parse_strictly(arguments)
    if parsed.repeats < 1:
        raise UserError(f"--repeats {parsed.repeats}: at least 1")
    from paceline.reports.tables import as_csv
    from paceline.studies import scaling_table
    from paceline.studies.scaling import measure, parse_counts

    asked = config_from(parsed, None)
    usual = f"scaling-{parsed.kind}-{asked.strategy.replace(':', '')}-{asked.model}"
    name = usual if asked.name is None else asked.name
    if not name or "/" in name or name in (".", ".."):
        raise UserError(f"--name '{name}' is not a folder name: use letters, digits, dots and dashes")
    folder = Path(asked.runs) / name
    with Console() as console:
        counts = parse_counts(parsed.counts, asked.device)
        found = measure(asked, parsed.kind, counts, parsed.repeats, folder, console)
        rows = scaling_table.rows_of(found)
        files = {"table.md": scaling_table.markdown(found), "table.csv": as_csv(rows)}
        made = write(folder, files)
        why_not = scaling_table.draw(found, folder / "figure.png")
        if why_not is not None:
            console.note(why_not)
    made += [] if why_not else [f"{folder}/figure.png"]
    print(
        "\n".join([scaling_table.plain(found, table_width()), "", *made]),
        file=sys.stderr if parsed.json else sys.stdout,
    )
    if parsed.json:
        print(json.dumps({"folder": str(folder), "kind": found.kind, "counts": rows}, indent=2))
    return 0
