"""Checks the coverage of the packages that hold the promises: lines and branches, each package by itself.

    python tools/check_coverage.py coverage.json

Reads the JSON report of coverage.py, prints one line per package, and exits with 1 if a package is below the bound.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("core", "codecs", "transports")
LEAST_PERCENT = 90.0


def percent_of(files: dict[str, Any], package: str) -> float:
    """Lines and branches that the tests ran, as a percentage of all lines and branches of the package."""
    summaries = [file["summary"] for path, file in files.items() if f"src/paceline/{package}/" in path]
    ran = sum(summary["covered_lines"] + summary["covered_branches"] for summary in summaries)
    everything = sum(summary["num_statements"] + summary["num_branches"] for summary in summaries)
    if everything == 0:
        raise ValueError(f"the report holds no file of src/paceline/{package}")
    return 100.0 * ran / everything


def main(report: str) -> int:
    files = json.loads(Path(report).read_text(encoding="utf-8"))["files"]
    found = {package: percent_of(files, package) for package in PACKAGES}
    for package, percent in found.items():
        print(f"src/paceline/{package}: {percent:.1f} %" + ("" if percent >= LEAST_PERCENT else " is too little"))
    return 0 if min(found.values()) >= LEAST_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
