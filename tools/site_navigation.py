"""A hook of mkdocs: what the site has beyond the pages that `mkdocs.yml` lists.

The first page is the README without its map of the source. Every decision has its page below Decisions; each way to
look at a run that has a page goes below See, and a page about a user's own code behind the tutorial.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SEE = {"Report": "report.md", "Watch": "watch.md", "Tracking": "tracking.md"}
OWN_CODE = {"Own code": "own-code.md"}
LEFT_OUT = "The house"


def on_config(config: Any) -> Any:
    """Fill in the navigation before the site is built."""
    docs = Path(config["docs_dir"])
    for entry in config["nav"]:
        if "Decisions" in entry:
            entry["Decisions"] = [f"decisions/{page.name}" for page in sorted((docs / "decisions").glob("*.md"))]
        if "See" in entry:
            entry["See"] = found(SEE, docs) + entry["See"]
    config["nav"][2:2] = found(OWN_CODE, docs)
    return config


def found(pages: dict[str, str], docs: Path) -> list[dict[str, str]]:
    """Those that are there, as entries of the navigation."""
    return [{title: page} for title, page in pages.items() if (docs / page).is_file()]


def on_files(files: Any, config: Any) -> Any:
    """Add the first page."""
    from mkdocs.structure.files import File

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=first_page(readme)))
    return files


def first_page(readme: str) -> str:
    """The README as a page of `docs/`: its links lead to pages, or are only names where they led to other files.

    >>> first_page("[rules](docs/rules.md), [the tour](examples/tour.py)")
    '[rules](rules.md), the tour (`examples/tour.py`)'
    """
    sections = re.split(r"(?m)^(?=## )", readme)
    text = "".join(section for section in sections if not section.startswith(f"## {LEFT_OUT}\n"))
    return re.sub(r"\[([^\]]+)\]\(([^):#]+)\)", _link, text)


def _link(match: re.Match[str]) -> str:
    label, target = match[1], match[2]
    if target.startswith("docs/") and target.endswith(".md"):
        page = target.removeprefix("docs/")
        return f"[{page if label == target else label}]({page})"
    return f"`{target}`" if label.strip("`") == target else f"{label} (`{target}`)"
