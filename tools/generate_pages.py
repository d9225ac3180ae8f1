"""Write the generated parts of the docs: the tree of `architecture.md`, the help of `cli.md`, the table of features.

    python tools/generate_pages.py          # or: make pages

Each part lies between the comments `<!-- NAME: generated -->` and `<!-- NAME: end -->`; the rest is written by hand.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import generate_stub

if TYPE_CHECKING:
    from paceline.settings.features import Feature

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/paceline"
TREE_COLUMNS, HELP_COLUMNS = 120, 100
TEXT_COLUMN = 28
"""Column of the module descriptions in the tree."""
WITH_TABLES = {"reproduce": (["reproduce", "distml"], ["reproduce", "mxnet"])}
"""Verbs with separate help texts for some first arguments."""


def source_tree(source: Path = SOURCE) -> str:
    """Return every package and module below `source` with the first sentence of its docstring."""
    lines = [entry(f"{source.name}/", source / "__init__.py", 0), *tree_lines(source, 1)]
    return "```text\n" + "\n".join(lines) + "\n```"


def tree_lines(folder: Path, depth: int) -> Iterator[str]:
    """Yield the lines of a package: its modules, then its packages."""
    for module in sorted(folder.glob("*.py")):
        if not module.name.startswith("__"):
            yield entry(module.name, module, depth)
    for package in sorted(folder.iterdir()):
        if package.is_dir() and next(package.rglob("*.py"), None) is not None:
            yield entry(f"{package.name}/", package / "__init__.py", depth)
            yield from tree_lines(package, depth + 1)


def entry(name: str, file: Path, depth: int) -> str:
    """Return one entry of the tree; a long description is wrapped."""
    head = "  " * depth + name
    said = first_sentence(file) if file.is_file() else ""
    text = textwrap.wrap(said, TREE_COLUMNS - TEXT_COLUMN, break_long_words=False, break_on_hyphens=False)
    head = head.ljust(TEXT_COLUMN) if len(head) < TEXT_COLUMN else head + "  "
    return (head + f"\n{'':{TEXT_COLUMN}}".join(text)).rstrip()


def first_sentence(file: Path) -> str:
    """Return the first sentence of the module's docstring without its full stop, or an empty string."""
    first, *_ = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n\n")
    return re.split(r"(?<=[^.])\.(?=$| [A-Z`])", " ".join(first.split()), maxsplit=1)[0]


def help_page() -> str:
    """Return the help of Paceline and of every verb; groups of flags shared with `train` are named, not repeated."""
    from paceline.cli.main import VERBS

    known = set(help_of("train").split("\n\n"))
    parts = ["## paceline", fenced(help_of())]
    for verb in (words for name in VERBS for words in ([name], *WITH_TABLES.get(name, ()))):
        text = help_of(*verb)
        parts += [f"## paceline {' '.join(verb)}", fenced(text if verb == ["train"] else without(text, known))]
    return "\n\n".join(parts)


def help_of(*verb: str) -> str:
    """Return the output of `paceline VERB --help-all` on a terminal of HELP_COLUMNS columns."""
    from paceline.cli.main import main

    output = io.StringIO()
    with wide_terminal(), contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main([*verb, "--help-all"])
    return output.getvalue().rstrip()


@contextlib.contextmanager
def wide_terminal() -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(HELP_COLUMNS)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def without(text: str, known: set[str]) -> str:
    """Replace the `known` groups of flags in `text` by one line with their names.

    >>> print(without("usage: x\\n\\ndata:\\n  --dataset NAME\\n\\nmodel:\\n  --lr X", {"data:\\n  --dataset NAME"}))
    usage: x
    <BLANKLINE>
    model:
      --lr X
    <BLANKLINE>
    as for 'paceline train': data
    """
    blocks = text.split("\n\n")
    repeated = [block for block in blocks if block in known and ":\n  --" in block]
    shared, kept = [block.partition(":")[0] for block in repeated], [block for block in blocks if block not in repeated]
    return "\n\n".join([*kept, *([f"as for 'paceline train': {', '.join(shared)}"] if shared else [])])


def fenced(text: str) -> str:
    return f"```text\n{text}\n```"


def feature_names() -> dict[Feature, str]:
    """Return how a user asks for each feature of the table."""
    from paceline.settings.strategies import Feature

    return {
        Feature.SEVERAL_WORKERS: "several workers",
        Feature.CODEC: "`--codec`",
        Feature.PULL_CODEC: "`--pull-codec`",
        Feature.ELASTIC: "`--max-workers`",
        Feature.DRAIN: "`paceline drain`, `--stall`",
        Feature.FAULTS: "`--faults`",
        Feature.RESTART: "`--restart`",
        Feature.RESTART_WORKERS: "`--restart-workers`",
        Feature.CAPTURE: "`--capture`",
        Feature.SKIP_BATCH: "`--recovery skip-batch`",
        Feature.AGGREGATE: "`--aggregate`",
        Feature.ROBUST: "`--robust`",
        Feature.RING_PATH: "`--path ring`",
        Feature.STAR_PATH: "`--path star`",
        Feature.LOCAL_STEPS: "`--local-steps`",
        Feature.STEPS_BY_SPEED: "`--local-steps speed`",
        Feature.OUTER_OPTIMIZER: "`--outer-lr`, `--outer-momentum`",
        Feature.SCHEDULE: "`--schedule`, `--warmup`, `--scale-lr`",
        Feature.OWN_EPOCHS: "`--epoch-mode own`",
        Feature.GRADIENT_RULE: "a `--rule` for gradients",
        Feature.DRIFT_RULE: "a `--rule` for drifts",
        Feature.WORKER_RULE: "a `--rule` that knows the workers",
        Feature.DROPPING_RULE: "a `--rule` that drops pushes",
        Feature.SERVER: "`paceline server`, `--hosts`, `--engine ray`",
        Feature.SEVERAL_SERVERS: "`--servers`",
        Feature.LAUNCHER: "torchrun, srun",
        Feature.TLS: "`--tls`",
    }


CELLS = {(True, True): "yes", (True, False): "built-in", (False, True): "own loop", (False, False): "no"}
"""What a cell says, by whether built-in training allows it and whether an own loop does."""
PLACES = ("built-in", "own loop")


def feature_table() -> str:
    """Return which strategy allows which feature, in built-in training and in own loops, and every reason against."""
    from paceline.settings.strategies import STRATEGIES, Topology

    names = [f"`{name}:{kind.letter}`" if kind.letter else f"`{name}`" for name, kind in STRATEGIES.items()]
    rows = [["", *names], ["---"] * (len(names) + 1)]
    reasons: dict[tuple[str, str], dict[str, list[str]]] = {}
    for feature, asked in feature_names().items():
        cells = []
        for name, kind in STRATEGIES.items():
            text = f"{name}:{max(1, kind.least)}" if kind.letter else name
            against = {place: reason_against(text, feature, place) for place in PLACES}
            cell = CELLS[against["built-in"] is None, against["own loop"] is None]
            on_star = cell == "own loop" and reason_against(text, feature, "built-in", "star") is None
            cells.append("star" if on_star and Topology.STAR in kind.axes.topologies else cell)
            for place, why in against.items():
                if why is not None:
                    reasons.setdefault((asked, why), {}).setdefault(place, []).append(f"`{name}`")
        if cells:
            rows.append([asked, *cells])
    lines = [["not", "with", "because the strategy"], ["---"] * 3]
    for (asked, why), places in reasons.items():
        everywhere = ", ".join(f"`{name}`" for name in STRATEGIES)
        lines.append([asked, "; ".join(one.replace(everywhere, "all") for one in where(places)), why])
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in table) for table in (rows, lines))


def where(places: dict[str, list[str]]) -> list[str]:
    """Return the strategies of one reason; if built-in training and own loops differ, each with its name.

    >>> where({"built-in": ["`a`"], "own loop": ["`a`"]}), where({"own loop": ["`a`", "`b`"]})
    (['`a`'], ['`a`, `b` (own loop)'])
    """
    found = {place: ", ".join(names) for place, names in places.items()}
    alike = len(found) == 2 and len(set(found.values())) == 1
    return [*found.values()][:1] if alike else [f"{names} ({place})" for place, names in found.items()]


def reason_against(strategy: str, feature: Feature, place: str, path: str | None = None) -> str | None:
    """Return why a strategy refuses a feature, in an own loop or in built-in training; None if it allows it."""
    from paceline.config import SCRIPT, RunConfig
    from paceline.settings.strategies import Feature, why_not, why_not_in_own_loop

    needed = {Feature.STEPS_BY_SPEED: Feature.LOCAL_STEPS, Feature.SEVERAL_SERVERS: Feature.SERVER}
    needed |= dict.fromkeys((Feature.WORKER_RULE, Feature.DROPPING_RULE), Feature.GRADIENT_RULE)
    config = RunConfig(strategy=strategy, task=f"{SCRIPT}:loop" if place == "own loop" else None, path=path)
    common = why_not_in_own_loop(feature) if place == "own loop" else None
    if common is not None:
        return f"(your own loop) {common}"
    return (why_not(config, needed[feature]) if feature in needed else None) or why_not(config, feature)


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "docs/architecture.md": ("tree", source_tree),
    "docs/cli.md": ("help", help_page),
    "docs/strategies/index.md": ("features", feature_table),
}


def filled(page: str) -> str:
    """Return the text of a page with its generated part updated."""
    name, make = PARTS[page]
    text = (ROOT / page).read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    assert found and closed, f"{page} has no '{begin}' followed by '{end}'"
    return f"{before}{begin}\n\n{make()}\n\n{end}{after}"


def main() -> None:
    """Write every generated part."""
    for page in PARTS:
        (ROOT / page).write_text(filled(page), encoding="utf-8")
    generate_stub.main()


if __name__ == "__main__":
    main()
