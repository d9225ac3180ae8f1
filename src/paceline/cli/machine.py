"""Verbs about this machine: its data sets, and what it has and lacks."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.cli.output import parser_for
from paceline.errors import UserError
from paceline.system.terminal import fold_for, table_width


def data_verb(arguments: list[str]) -> int:
    parser = parser_for(
        "data", "List the data sets and where they lie, or fetch one (the only verb that uses the network)."
    )
    parser.add_argument("action", choices=("list", "get"))
    parser.add_argument("name", nargs="?", help="the data set to get")
    parser.add_argument("--data-dir", metavar="DIR", help="look here first, or fetch to here")
    parser.add_argument("--mirror", metavar="URL", help="fetch from here instead of upstream")
    parsed = parser.parse_strictly(arguments)
    place = Path(parsed.data_dir) if parsed.data_dir is not None else None
    if parsed.action == "list":
        from paceline.data.download import status
        from paceline.reports.tables import data_table

        print(data_table(status(place), table_width()))
        return 0
    if parsed.name is None:
        raise UserError("which one? 'paceline data list' shows them, as in 'paceline data get fashion-mnist'")
    from paceline.data.download import get

    print(get(parsed.name, place, parsed.mirror))
    return 0


def doctor_verb(arguments: list[str]) -> int:
    parser_for("doctor", "What this machine has, what will be slow, what to do about it.").parse_strictly(arguments)
    from paceline.cli.doctor import examine

    findings = examine()
    print(fold_for(sys.stdout, findings.lines))
    return 0 if findings.usable else 1
