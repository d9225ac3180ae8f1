"""A hook of mkdocs: what the site has beyond the pages that `mkdocs.yml` lists.

The first page is the README without its map of the source. Every decision has its page below Decisions; each way to
look at a run that has a page goes below See, and a page about a user's own code behind the tutorial.
"""

from __future__ import annotations

import os
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


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Links of a page to files that are no part of the site become their names."""
    return without_outside_links(markdown, Path("docs") / page.file.src_uri)


def without_outside_links(text: str, page: Path) -> str:
    """`text`, which stands in the file `page` of the repository, with links to pages alone.

    >>> without_outside_links("[rules](rules.md), [the tour](../examples/tour.py)", Path("docs/api.md"))
    '[rules](rules.md), the tour (`examples/tour.py`)'
    """

    def link(match: re.Match[str]) -> str:
        label, target = match[1], os.path.normpath(page.parent / match[2])
        if target.startswith("docs/") or not (ROOT / target).exists():
            return match[0]  # a page, or nothing at all, which mkdocs complains of
        return f"`{target}`" if label.strip("`") in (target, match[2]) else f"{label} (`{target}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^):#]+)\)", link, text)


def first_page(readme: str) -> str:
    """The README as a page of `docs/`.

    >>> first_page("[docs/rules.md](docs/rules.md), [the tour](examples/tour.py)")
    '[rules.md](rules.md), the tour (`examples/tour.py`)'
    """
    sections = re.split(r"(?m)^(?=## )", readme)
    kept = "".join(section for section in sections if not section.startswith(f"## {LEFT_OUT}\n"))
    text = without_outside_links(kept, Path("README.md"))
    return text.replace("[docs/", "[").replace("](docs/", "](")
