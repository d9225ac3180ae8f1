"""Count the lines that each library adds to the same program, and write the diffs into docs/coming-from/."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "examples" / "lines_to_adopt"
PAGES = ROOT / "docs" / "coming-from"
OURS = "paceline"
NAMES = {
    OURS: "Paceline",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "ddp": "DDP",
    "hivemind": "hivemind",
    "torchft": "torchft",
}
PAGE_OF = {"ddp": "ddp.md", "accelerate": "accelerate.md", "fabric": "fabric.md"}
"""Pages that show the diff from a library's program to ours; those of the others say it in words."""
TABLE = re.compile(r"(?<=<!-- lines: generated -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)
DIFF = re.compile(r"(?<=<!-- diff: generated -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)


def code_of(library: str) -> list[str]:
    """The lines of a library's program without its docstring, empty lines and comments."""
    name = f"with_{library}.py" if library else "plain.py"
    lines = (PROGRAMS / name).read_text(encoding="utf-8").splitlines()[1:]
    return [line for line in lines if line.strip() and not line.strip().startswith("#")]


def changes(before: list[str], after: list[str]) -> list[str]:
    """The lines of a diff, with two lines around each change."""
    found = list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]
    return [" ..." if line.startswith("@@") else line for line in found]


def count(library: str) -> tuple[int, int]:
    """How many lines a library adds to the plain program, and how many it removes."""
    signs = [line[0] for line in changes(code_of(""), code_of(library))]
    return signs.count("+"), signs.count("-")


def table() -> str:
    """The table of lines to adopt, those with the fewest first."""
    rows = sorted(((*count(name), name) for name in NAMES), key=lambda row: row[0] + row[1])
    cells = [f"| {NAMES[name]} | {added} | {removed} | with_{name}.py |" for added, removed, name in rows]
    return "\n".join(["| | lines added | lines removed | program |", "|---|---|---|---|", *cells])


def diff_block(library: str) -> str:
    """The diff from a library's program to ours, as a page shows it."""
    return "\n".join(["```diff", *changes(code_of(library), code_of(OURS))[1:], "```"])


def written(page: Path) -> str:
    """The text of a page with its generated parts made again."""
    text = TABLE.sub(lambda _: table(), page.read_text(encoding="utf-8"))
    library = next((name for name, file in PAGE_OF.items() if file == page.name), None)
    return DIFF.sub(lambda _: diff_block(library), text) if library is not None else text


def main() -> None:
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(written(page), encoding="utf-8")


if __name__ == "__main__":
    main()
