"""Print the result of a run at its end."""

from __future__ import annotations

import sys
from typing import Any

from paceline.analysis.statistics import FAILED
from paceline.settings.stopping import why_missed
from paceline.system.strict_json import to_json
from paceline.system.terminal import fold_for

EXIT_CODES = {"finished": 0, "diverged": 3, "collapsed": 3, "stopped": 130}


def show(folder: Any, result: dict[str, Any], as_json: bool) -> int:
    """Print the closing lines, on standard error if JSON goes to standard output; return the exit code."""
    from paceline.analysis.status import read_status
    from paceline.data.datasets import DATASETS
    from paceline.reports.sentences import closing_lines

    info = DATASETS.get(result["dataset"]) if result["task"] is None else None
    shown = {**result, "reason": None} if result["status"] in FAILED else result  # its reason is the last line
    shares = [worker.shares for worker in read_status(folder.path).workers]
    lines = closing_lines(shown, info.classes if info is not None else None, str(folder.path), shares)
    stream = sys.stderr if as_json else sys.stdout
    print(fold_for(stream, lines), file=stream)
    if as_json:
        print(to_json(result, indent=2))
    if (missed := why_missed(folder.config(), result)) is not None:
        print(fold_for(sys.stderr, [f"paceline: {missed}"]), file=sys.stderr)
    if result["status"] in FAILED:
        print(fold_for(sys.stderr, [f"paceline: {result['reason']}"]), file=sys.stderr)
    if result["status"] == "stopped":
        hint = f"paceline: stopped early; {folder.resume_hint(folder.config())}"
        print(fold_for(sys.stderr, [hint]), file=sys.stderr)
    return EXIT_CODES[result["status"]]
