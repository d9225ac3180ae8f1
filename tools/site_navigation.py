"""Hook of mkdocs: add the pages that `mkdocs.yml` does not list.

The first page is the README. Every file of `docs/decisions` becomes a page under Decisions.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_config(config: Any) -> Any:
    """Fill in the navigation before the site is built."""
    pages = sorted((Path(config["docs_dir"]) / "decisions").glob("*.md"))
    decisions = entry_of(config["nav"], "Decisions")
    decisions["Decisions"] = [f"decisions/{page.name}" for page in pages]
    return config


def entry_of(nav: list[Any], title: str) -> dict[str, Any]:
    """Return the entry of the navigation with this title, at any depth."""
    for entry in nav:
        if isinstance(entry, dict):
            for name, below in entry.items():
                if name == title:
                    return entry
                if isinstance(below, list) and (found := entry_of(below, title)):
                    return found
    return {}


def on_files(files: Any, config: Any) -> Any:
    """Add the first page."""
    from mkdocs.structure.files import File

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=first_page(readme)))
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Replace links to files outside the site by their names."""
    return without_outside_links(markdown, Path("docs") / page.file.src_uri)


def without_outside_links(text: str, page: Path) -> str:
    """Replace links to files outside the site in the text of `page` by their names.

    >>> without_outside_links("[rules](rules.md), [the tour](../examples/tour.py)", Path("docs/api.md"))
    '[rules](rules.md), the tour (`examples/tour.py`)'
    >>> without_outside_links("[`core/worker.py`](../src/paceline/core/worker.py)", Path("docs/api.md"))
    '`core/worker.py`'
    """

    def link(match: re.Match[str]) -> str:
        label, target = match[1], os.path.normpath(page.parent / match[2])
        if target.startswith("docs/") or not (ROOT / target).exists():
            return match[0]  # a page, or a broken link, which mkdocs reports
        named = (label.startswith("`") and target.endswith(label.strip("`/"))) or label in (target, match[2])
        return f"`{label.strip('`')}`" if named else f"{label} (`{target}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^):#]+)\)", link, text)


def first_page(readme: str) -> str:
    """Return the README as a page of `docs/`.

    >>> first_page("[docs/rules.md](docs/rules.md), [the tour](examples/tour.py)")
    '[rules.md](rules.md), the tour (`examples/tour.py`)'
    """
    text = without_outside_links(readme, Path("README.md"))
    return text.replace("[docs/", "[").replace("](docs/", "](")
