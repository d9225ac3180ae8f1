"""The README is always true: its commands, names, links, packages and first run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import paceline
from paceline.cli.arguments import Parser, add_settings, config_from
from paceline.cli.main import VERBS
from paceline.settings.codecs import CODECS
from paceline.settings.resolve import DATASETS, MODELS, resolve
from paceline.settings.rules import RULES
from paceline.settings.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src/paceline"


def blocks(kind: str = "[a-z]*") -> list[str]:
    """The fenced blocks of the README."""
    return re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL)


def test_its_tree_has_every_package_and_no_other() -> None:
    (tree,) = [block for block in blocks() if block.startswith("src/paceline/\n")]
    listed = [line.split()[0].rstrip("/") for line in tree.splitlines()[1:]]
    packages = {path.parent.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py") if path.parent != SOURCE}
    assert sorted(listed) == sorted(packages)


def commands() -> list[str]:
    """Every `paceline ...` and `make ...` command in the README's blocks, without its comment."""
    lines = [line.partition("#")[0] for block in blocks("sh") for line in block.splitlines()]
    found = [part.strip() for line in lines for part in line.split("&&")]
    found = [re.sub(r"^PACELINE_TOKEN=\S+ ", "", command) for command in found]
    return [command for command in found if command.startswith(("paceline ", "make "))]


def test_its_commands_are_found() -> None:
    verbs = {command.split()[1] for command in commands()}
    assert {"setup", "train", "server", "worker", "simulate", "plan", "replay", "resume", "report", "watch"} <= verbs


@pytest.mark.parametrize("command", commands())
def test_every_command_is_one_that_works(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    assert words[1] in VERBS
    if words[1] in ("train", "simulate") and "--like" not in words:
        parser = Parser(words[1], "")
        parser.add_argument("file", nargs="?")
        add_settings(parser)
        resolve(config_from(parser.parse_strictly(words[2:]), None))


def test_every_make_target_in_a_sentence_exists() -> None:
    targets = set(re.findall(r"`make (\w+)`", README))
    assert targets and all(re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for name in targets)


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("README.md", STRATEGIES),
        ("docs/rules.md", RULES),
        ("docs/codecs.md", CODECS),
        ("docs/models.md", MODELS),
        ("docs/data.md", DATASETS),
    ],
)
def test_everything_that_has_a_name_has_its_row(page: str, names: dict[str, object]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not [name for name in names if not re.search(rf"^\|[^|]*`{name}[:`][^|]*\|.*\|", text, re.MULTILINE)]


@pytest.mark.parametrize("names", [RULES, CODECS, MODELS, DATASETS])
def test_the_readme_does_not_repeat_the_tables_of_other_pages(names: dict[str, object]) -> None:
    assert not [name for name in names if re.search(rf"^\| `{name}[:`]", README, re.MULTILINE)]


def test_every_name_of_the_api_that_is_mentioned_exists() -> None:
    mentioned = set(re.findall(r"\bpaceline\.([A-Za-z]+)\b", README))
    assert mentioned <= set(paceline.__all__), mentioned - set(paceline.__all__)
    session = set(re.findall(r"\bsession\.([a-z]+)\(", README))
    assert all(hasattr(paceline.Session, name) for name in session)


def test_all_is_what_can_be_imported() -> None:
    assert sorted(paceline.__all__) == paceline.__all__
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_every_link_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def test_its_measured_figures_are_those_of_the_page_about_them() -> None:
    measured = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    _, _, table = README.partition("| what | figure | command |\n|---|---|---|\n")
    rows = [row.strip("|").split(" | ") for row in table.partition("\n\n")[0].splitlines()]
    assert len(rows) == 5
    for what, figure, command in rows:
        beside = [line for line in measured.splitlines() if command.strip(" |") in line]
        assert any(figure.strip() in line for line in beside), f"{what}: {figure} is not in docs/measured.md"


def test_the_readme_is_one_page() -> None:
    assert len(README.splitlines()) <= 180


def test_every_benchmark_named_in_the_readme_exists() -> None:
    for script in set(re.findall(r"benchmarks/\w+\.py", README)):
        assert (ROOT / script).is_file(), script


def test_changelog_and_citation_name_the_version_of_the_package() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def shape_of(line: str) -> str:
    """A line of output with every number replaced, and nothing behind the dots that shorten it.

    >>> shape_of("376 updates, 12,016 samples")
    '# updates, # samples'
    """
    line = re.sub(r"(?<=worst first: ).*", "...", line)  # which class is worst may differ
    return re.sub(r"\d[\d.,:/]*\d|\d", "#", line.partition("...")[0].rstrip())


@pytest.mark.real
def test_the_first_run_prints_what_the_readme_shows(tmp_path: Path) -> None:
    (command,) = [command for command in commands() if command.startswith("paceline train")]
    shown = blocks("text")[0].splitlines()
    words = [sys.executable, "-m", *shlex.split(command)]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True)
    printed = [shape_of(line) for line in (ran.stderr + ran.stdout).splitlines()]
    wrong = first_difference(shown, printed)
    assert wrong is None, f"not printed there: {wrong}\nbut: {ran.stderr}{ran.stdout}"


def first_difference(shown: list[str], printed: list[str]) -> str | None:
    """The first line that was not printed right after the one before; `...` alone stands for any lines."""
    left = list(printed)
    for before, line in pairwise(["", *shown, "..."]):
        if line == "...":
            continue
        while before == "..." and left and not left[0].startswith(shape_of(line)):
            left.pop(0)
        if not left or not left.pop(0).startswith(shape_of(line)):
            return line
    return None if shown[-1] == "..." or not left else left[0]


def test_a_line_that_the_readme_leaves_out_has_dots_in_its_place() -> None:
    printed = ["a", "b", "c # d", "e"]
    assert first_difference(["a", "...", "c 5 ...", "e"], printed) is None
    assert first_difference(["a", "c 5 d", "e"], printed) == "c 5 d"
    assert first_difference(["a", "...", "c 5 d"], printed) == "e"
