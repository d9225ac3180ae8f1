"""The documentation is always true: its pages, links, commands and pictures."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from pathlib import Path

import check_site
import pytest
import site_navigation
import strategy_figures
from safetensors.torch import save_file

from paceline.cli.arguments import Parser, add_settings, config_from
from paceline.cli.main import VERBS
from paceline.settings.resolve import resolve
from paceline.settings.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

PAGES = sorted(DOCS.rglob("*.md"))
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS))


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"[\w/-]+\.md", CONFIG.partition("\nnav:\n")[2])
    pages = [name_of(page) for page in PAGES if page.parent.name != "decisions"]
    assert sorted(listed) == sorted([*pages, "index.md"])


def test_the_navigation_has_five_tabs() -> None:
    tabs = re.findall(r"^  - (.+?):", CONFIG.partition("\nnav:\n")[2], re.MULTILINE)
    assert tabs == ["Start", "Guides", "Strategies and rules", "Reference", "Background"]


def test_every_decision_is_listed_in_the_background() -> None:
    nav: list[object] = [{"Start": "index.md"}, {"Background": ["architecture.md", {"Decisions": []}]}]
    site_navigation.on_config({"docs_dir": str(DOCS), "nav": nav})
    decisions = site_navigation.entry_of(nav, "Decisions")["Decisions"]
    assert decisions == sorted(name_of(page) for page in PAGES if page.parent.name == "decisions")
    assert re.search(r"^  - Background:\n(?:      .*\n)*      - Decisions: \[\]$", CONFIG, re.MULTILINE)


def test_no_page_has_a_placeholder_left() -> None:
    """Names in capitals stand in code spans; elsewhere one is a result that nobody filled in."""
    code, placeholder = (
        re.compile(r"```.*?```|`[^`]*`", re.DOTALL),
        r"\b(?:[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+|TODO|FIXME|TBD)\b",
    )
    found = {name_of(page): re.findall(placeholder, code.sub("", page.read_text(encoding="utf-8"))) for page in PAGES}
    assert not {name: words for name, words in found.items() if words}


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            where = (page.parent / target).resolve()
            assert where.exists() or where == DOCS / "index.md", f"{name_of(page)} links to {target}"


def test_a_link_to_a_file_that_is_no_page_is_its_name_on_the_site() -> None:
    text = "[a](../examples/tour.py), [b](rules.md), [c](nowhere.md), ![d](../README.md)"
    on_site = site_navigation.without_outside_links(text, Path("docs/data.md"))
    assert on_site == "a (`examples/tour.py`), [b](rules.md), [c](nowhere.md), ![d](../README.md)"


def test_the_first_page_is_the_readme_with_links_that_lead_to_pages() -> None:
    page = site_navigation.first_page((ROOT / "README.md").read_text(encoding="utf-8"))
    assert page.startswith("# Paceline\n") and "](figures/pace.svg)" in page
    targets = re.findall(r"\]\(([^):#]+)\)", page)
    assert targets and all((DOCS / target).is_file() for target in targets)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_a_page_with_its_picture_and_a_command(strategy: str) -> None:
    text = (DOCS / f"strategies/{strategy}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {strategy}") and f"figures/strategies/{strategy}.svg" in text
    assert re.search(rf"^paceline train --strategy {strategy}[ :]", text, re.MULTILINE)


@pytest.mark.parametrize("name", [*STRATEGIES, strategy_figures.PACE])
def test_every_picture_is_the_one_that_is_made_today(name: str) -> None:
    there = strategy_figures.file_of(name).read_text(encoding="utf-8")
    assert strategy_figures.make(name) == there, f"python tools/strategy_figures.py {name}"


PLAIN_COMMANDS = ("codecs", "landscape", "local-steps", "models", "rules", "simulate")
"""Pages whose commands need no run folder of the reader's."""


def commands() -> list[str]:
    """Every `paceline train` and `simulate` in the pages that show commands for any machine."""
    pages = [page.read_text(encoding="utf-8") for page in PAGES if page.parent.name == "strategies"]
    pages += [(DOCS / f"{name}.md").read_text(encoding="utf-8") for name in PLAIN_COMMANDS]
    return re.findall(r"^paceline (?:train|simulate) .*$", "\n".join(pages), re.MULTILINE)


@pytest.mark.parametrize("command", commands())
def test_every_command_that_trains_is_one_that_works(command: str, tmp_path: Path) -> None:
    words = shlex.split(command, comments=True)
    parser = Parser(words[1], "")
    add_settings(parser)
    config = config_from(parser.parse_strictly(words[2:]), None)
    if config.weights is not None:  # a file of the reader's
        save_file({}, tmp_path / "weights.safetensors")
        config = dataclasses.replace(config, weights=str(tmp_path / "weights.safetensors"))
    resolve(config)


def test_every_verb_and_benchmark_that_pages_name_exists() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        verbs = set(re.findall(r"^(?:\$ )?paceline ([a-z]+)\b", text, re.MULTILINE))
        assert verbs <= set(VERBS), f"{name_of(page)}: {verbs - set(VERBS)}"
        for script in set(re.findall(r"\b(?:benchmarks|tools)/\w+\.py", text)):
            assert (ROOT / script).is_file(), f"{name_of(page)}: {script}"


def test_a_site_that_fetches_from_elsewhere_is_found_out(tmp_path: Path) -> None:
    good = '<link rel="canonical" href="https://a.example/"><a href="https://a.example/">read on</a><img src="b.svg">'
    (tmp_path / "good.html").write_text(good)
    assert check_site.main(tmp_path) == 0
    for bad in (
        '<script src="https://cdn.example/a.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/a.css">',
        "<style>@import 'https://fonts.example/a.css';</style>",
        '<p style="background: url(http://a.example/b.png)">',
        '<pre class="mermaid">graph LR</pre>',
    ):
        (tmp_path / "bad.html").write_text(bad)
        assert check_site.main(tmp_path) == 1, bad


def messages() -> list[str]:
    """Every line that the page about trouble quotes."""
    quoted = re.findall(r"```text\n(.*?)```", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in quoted for line in block.splitlines()]


LEAST_LETTERS = 8
"""A part of a text that is shorter says nothing about a message in which it occurs."""
LEAST_SHARE = 0.6
"""Of a message that the source must account for; the rest is names and numbers."""


def texts_of_the_source() -> list[list[str]]:
    """Every text in the source, as the parts between what is filled in."""
    found = []
    for file in (ROOT / "src/paceline").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append([str(part.value) for part in node.values if isinstance(part, ast.Constant)])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append([node.value])
    return [parts for parts in found if any(len(part) >= LEAST_LETTERS for part in parts)]


def max_workers_of(parts: list[str], message: str) -> list[range]:
    """Where all parts of a text stand in the message, one after the other; nowhere if one is missing."""
    found, at = [], 0
    for part in parts:
        at = message.find(part, at)
        if at < 0:
            return []
        found.append(range(at, at + len(part)))
        at += len(part)
    return found


def share_said(message: str, texts: list[list[str]]) -> float:
    """How much of the message stands in the source."""
    ranges = [place for parts in texts for place in max_workers_of(parts, message)]
    return len({at for place in ranges for at in place}) / len(message)


def test_every_message_about_trouble_is_one_that_the_source_can_say() -> None:
    texts = texts_of_the_source()
    assert len(messages()) >= 25
    gone = [message for message in messages() if share_said(message.removeprefix("paceline: "), texts) < LEAST_SHARE]
    assert not gone, gone
    assert share_said("runs/NAME has been eaten by the dog at update 118: buy another", texts) < LEAST_SHARE


def test_the_keys_of_a_result_are_those_that_the_page_names(tmp_path: Path) -> None:
    table = (DOCS / "api.md").read_text(encoding="utf-8").partition("### What it returns")[2].partition("\n:::")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    config = strategy_figures.config_of(strategy_figures.FIGURES_OF["sync"], tmp_path)
    _, result = strategy_figures.simulate(config, strategy_figures.Console(quiet=True))
    assert len(named) > 20 and named - {"folder"} <= set(result), named - set(result)


def test_the_page_about_run_folders_names_every_file_and_every_kind_of_event() -> None:
    page = (DOCS / "run-folder.md").read_text(encoding="utf-8")
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "src/paceline").rglob("*.py"))
    written = set(re.findall(r'events\.write\(\s*"(\w+)"', source))
    rows = page.partition("| kind | written when |")[2]
    named = {name for row in re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert len(written) > 10 and written <= named, written - named
    assert not [name for name in named if f'"{name}"' not in source]
    folder = (ROOT / "src/paceline/runs/folder.py").read_text(encoding="utf-8")
    files = re.findall(r'path / "([\w.]+\.\w+)"', folder)
    assert len(files) > 5 and not [name for name in files if name not in page]


def test_the_page_about_simulation_has_a_row_for_every_kind_of_fault() -> None:
    from paceline.settings.fault_table import KINDS

    table = (DOCS / "simulate.md").read_text(encoding="utf-8").partition("| kind | effect |")[2]
    for kind, (needed, possible) in KINDS.items():
        (row,) = re.findall(rf"^\| `{kind}` \|.*$", table, re.MULTILINE)
        assert not [key for key in (*needed, *possible) if f"`{key}`" not in row], row
