"""What several verbs share: their parser, and how a run's end is shown."""

from __future__ import annotations

import json
import sys
from typing import Any

from paceline.cli.arguments import Parser
from paceline.reports.console import closing_lines
from paceline.system.terminal import fold_for

EXIT_CODES = {"finished": 0, "diverged": 3, "stopped": 130}


def parser_for(verb: str, description: str, usage: str | None = None) -> Parser:
    return Parser(f"paceline {verb}", description, usage)


def show(folder: Any, result: dict[str, Any], as_json: bool) -> int:
    """The closing lines (on standard error when JSON goes to standard output), then the exit code."""
    from paceline.data.datasets import DATASETS

    info = DATASETS.get(result["dataset"]) if result["task"] is None else None
    lines = closing_lines(result, info.classes if info is not None else None, str(folder.path))
    stream = sys.stderr if as_json else sys.stdout
    print(fold_for(stream, lines), file=stream)
    if as_json:
        print(json.dumps(result, indent=2))
    if result["status"] == "diverged":
        print(fold_for(sys.stderr, [f"paceline: {result['reason']}"]), file=sys.stderr)
    if result["status"] == "stopped":
        resume_hint = f"paceline: stopped early; {folder.resume_hint(folder.config())}"
        print(fold_for(sys.stderr, [resume_hint]), file=sys.stderr)
    return EXIT_CODES[result["status"]]
