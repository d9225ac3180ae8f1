"""Check that a built site loads nothing from another host: `python tools/check_site.py site`."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "video": "src"}
NOT_FETCHED = {"canonical", "next", "prev", "author", "license", "alternate"}
"""Values of `rel` whose link the browser does not load."""
OUTSIDE = re.compile(r"^(https?:)?//", re.IGNORECASE)
CSS_ADDRESS = re.compile(r"""(?:url\(|@import\s)\s*['"]?((?:https?:)?//[^'")\s;]+)""", re.IGNORECASE)


class Fetches(HTMLParser):
    """Collects the external addresses that a page loads; links to click on do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(FETCHED.get(tag, "")) or ""
        if tag == "link" and given.get("rel") in NOT_FETCHED:
            return
        if OUTSIDE.match(address):
            self.outside.append(address)
        if "mermaid" in (given.get("class") or "").split():
            self.outside.append("a diagram, whose script the theme fetches from a CDN: draw it as SVG")
        self.outside.extend(CSS_ADDRESS.findall(given.get("style") or ""))

    def handle_data(self, data: str) -> None:
        if self.get_starttag_text() and str(self.get_starttag_text()).startswith("<style"):
            self.outside.extend(CSS_ADDRESS.findall(data))


def fetched_outside(page: Path) -> list[str]:
    """Return the addresses on other hosts that `page` (HTML, CSS or SVG) makes a browser load."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".html":
        parser = Fetches()
        parser.feed(text)
        return parser.outside
    return CSS_ADDRESS.findall(text)


def main(site: Path) -> int:
    """Print one line per external address; return 1 if there are any."""
    pages = [page for page in sorted(site.rglob("*")) if page.suffix in (".html", ".css", ".svg")]
    found = [f"{page}: {address}" for page in pages for address in fetched_outside(page)]
    print("\n".join(found) if found else f"{len(pages)} files of {site}, nothing from another host")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
