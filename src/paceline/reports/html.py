"""Renders runs as one HTML page that loads nothing: report data as JSON, and scripts that draw it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from paceline.config import FIELDS, RunConfig, to_dict
from paceline.system.strict_json import to_json

SCRIPTS = (
    *("numbers.js", "chart.js", "bars.js", "timeline.js", "tables.js", "specs.js", "one_run.js", "names.js"),
    *("compared_specs.js", "several_runs.js", "page.js", "feed.js"),
)


@dataclass(frozen=True)
class LiveFeed:
    """The URL of the server-sent events of a live page; each event is a JSON list of changed runs."""

    url: str


def render(digests: Sequence[dict[str, Any]], live: LiveFeed | None = None) -> str:
    """Return the page as text."""
    facts = {
        "runs": list(digests),
        "live": live.url if live is not None else None,
        "groups": {name: spec.metadata["group"] for name, spec in FIELDS.items()},
        "help": {name: spec.metadata["help"] for name, spec in FIELDS.items()},
        "defaults": to_dict(RunConfig()),
    }
    title = f"{digests[0]['name']} – Paceline" if len(digests) == 1 else f"{len(digests)} runs – Paceline"
    connect = "'self'" if live is not None else "'none'"
    script = "\n".join(map(_asset, SCRIPTS))
    data = to_json(facts, compact=True).replace("<", "\\u003c")  # closes no HTML element
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:; connect-src {connect}">
<title>{title.replace("&", "&amp;").replace("<", "&lt;")}</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<main id="page"><noscript>This page draws its charts with JavaScript: enable it.</noscript></main>
<script type="application/json" id="facts">{data}</script>
<script>
(() => {{
"use strict";
{script}
}})();
</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return (files("paceline.reports") / "assets" / name).read_text(encoding="utf-8")
