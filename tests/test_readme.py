"""The README is always true: its tree, its commands, its names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import paceline
from paceline.cli.arguments import Parser, add_settings, config_from
from paceline.cli.main import VERBS
from paceline.settings.resolve import resolve

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SOURCE = ROOT / "src/paceline"


def blocks() -> list[str]:
    """The fenced blocks of the README."""
    return re.findall(r"```[a-z]*\n(.*?)```", README, re.DOTALL)


def listed_paths() -> set[Path]:
    """Every path in the README's tree."""
    (tree,) = [block for block in blocks() if block.startswith("src/paceline/")]
    paths, folders = set(), [""]
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        paths.add(ROOT / "/".join(part.strip("/") for part in folders if part))
    return paths


def test_every_path_in_the_tree_exists() -> None:
    missing = [str(path.relative_to(ROOT)) for path in listed_paths() if not path.exists()]
    assert not missing


def test_every_source_file_is_in_the_tree() -> None:
    files = {path for path in SOURCE.rglob("*.py") if not path.name.startswith("__")}
    assert not {str(path.relative_to(SOURCE)) for path in files - listed_paths()}


def commands() -> list[str]:
    """Every `paceline ...` and `make ...` line in the README's blocks, without its comment."""
    lines = [line.partition("#")[0].strip() for block in blocks() for line in block.splitlines()]
    return [line for line in lines if line.startswith(("paceline ", "make "))]


@pytest.mark.parametrize("command", commands())
def test_every_command_is_one_that_works(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    assert words[1] in VERBS
    if words[1] == "train":
        parser = Parser("paceline train", "")
        parser.add_argument("file", nargs="?")
        add_settings(parser)
        resolve(config_from(parser.parse_strictly(words[2:]), None))


def test_every_strategy_has_its_row() -> None:
    from paceline.settings.strategies import STRATEGIES

    assert all(re.search(rf"^\| `{name}", README, re.MULTILINE) for name in STRATEGIES)


def test_every_rule_has_its_row() -> None:
    from paceline.settings.rules import RULES

    assert all(re.search(rf"^\|.*`{name}[:`].*\|.*\|", README, re.MULTILINE) for name in RULES)


def test_every_codec_has_its_row() -> None:
    from paceline.settings.codecs import CODECS

    assert all(re.search(rf"^\|.*`{name}[:`].*\|.*\|", README, re.MULTILINE) for name in CODECS)


def test_every_name_of_the_api_that_is_mentioned_exists() -> None:
    mentioned = set(re.findall(r"\bpaceline\.([A-Za-z]+)\b", README))
    assert mentioned <= set(paceline.__all__), mentioned - set(paceline.__all__)
    session = set(re.findall(r"\bsession\.([a-z]+)\(", README))
    assert all(hasattr(paceline.Session, name) for name in session)


def test_all_is_what_can_be_imported() -> None:
    assert sorted(paceline.__all__) == paceline.__all__
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_benchmark_named_in_the_readme_exists() -> None:
    for script in set(re.findall(r"benchmarks/\w+\.py", README)):
        assert (ROOT / script).is_file(), script
