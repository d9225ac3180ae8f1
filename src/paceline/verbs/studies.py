"""Verbs that run many settings and make one table of them: reproduce."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import UserError
from paceline.flags import number
from paceline.reports.console import Console
from paceline.verbs.ending import parser_for

REPRODUCE_DESCRIPTION = """A published table run again, ours beside theirs, all rows side by side on one GPU.

  paceline reproduce optml --device cuda --data-dir DIR
  paceline reproduce optml --rows "async lenet5" --seeds 3 --epochs 1"""


def reproduce_verb(arguments: list[str]) -> int:
    parser = parser_for("reproduce", REPRODUCE_DESCRIPTION, "paceline reproduce optml [flags]")
    parser.add_argument("table", choices=("optml",), help="which published table")
    parser.add_argument("--rows", help="numbers and ranges (1,4,7-9), or words of the names (async cnn) [all]")
    parser.add_argument("--seeds", type=number(int), default=1, help="runs of each row; mean and spread [1]")
    parser.add_argument("--epochs", type=number(float), default=6.0, help="passes of each worker over its data [6]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: all rows side by side [cpu]")
    parser.add_argument("--data-dir", metavar="DIR", help="folder that holds the data set")
    parser.add_argument("--runs", metavar="DIR", default="runs/optml", help="a run folder a row goes here [runs/optml]")
    parsed = parser.parse_strictly(arguments)
    if parsed.seeds < 1 or not parsed.epochs > 0:
        raise UserError(f"--seeds {parsed.seeds} --epochs {parsed.epochs:g}: both must be above zero")
    from paceline.published.optml import choose_rows
    from paceline.reproduce import as_csv, draw, markdown, reproduce, runs_as_csv, summary

    rows, folder = choose_rows(parsed.rows), Path(parsed.runs)
    with Console() as console:
        found = reproduce(
            rows, parsed.seeds, parsed.epochs, parsed.device, parsed.data_dir, folder, console, parsed.device == "cuda"
        )
        table = markdown(found)
        made = write(folder, {"table.md": table, "table.csv": as_csv(found), "runs.csv": runs_as_csv(found)})
        why_not = draw(found, folder / "figure.png")
        if why_not is not None:
            console.note(why_not)
    print(table + "\n" + "\n".join([*summary(found), *made, *([] if why_not else [f"{folder}/figure.png"])]))
    return 0


def write(folder: Path, files: dict[str, str]) -> list[str]:
    """Write them all; returns their paths."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [f"{folder}/{name}" for name in files]
