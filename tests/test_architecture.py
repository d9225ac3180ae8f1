"""The generated pages are up to date, and what is written by hand in them names what exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import generate_pages
import pytest

from paceline.settings.features import Feature

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/paceline"
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
MAX_TERMS = 40


def test_the_tree_is_the_one_that_is_made_today() -> None:
    assert generate_pages.filled("docs/architecture.md") == ARCHITECTURE, "make pages"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of argparse lay help texts out differently")
def test_the_help_texts_are_those_that_are_printed_today() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert generate_pages.filled("docs/cli.md") == page, "make pages"


def test_the_table_of_features_is_the_one_that_the_program_checks() -> None:
    page = (ROOT / "docs/strategies/index.md").read_text(encoding="utf-8")
    assert generate_pages.filled("docs/strategies/index.md") == page, "make pages"
    assert set(generate_pages.feature_names()) == set(Feature), "each has a name in the table, or is not shown"


def test_the_tree_has_every_source_file_at_its_depth(tmp_path: Path) -> None:
    folders, listed = [""], set()
    for line in generate_pages.source_tree().splitlines()[2:-1]:
        depth = (len(line) - len(line.lstrip())) // 2
        if depth < generate_pages.TEXT_COLUMN // 2:  # else the rest of a long description
            folders[depth:] = [line.split()[0]]
            listed.add("".join(folders[1:]))
    files = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if not path.name.startswith("__")}
    assert files == {name for name in listed if name.endswith(".py")}


def test_a_module_is_described_by_its_first_sentence(tmp_path: Path) -> None:
    package = tmp_path / "house"
    (package / "room").mkdir(parents=True)
    (package / "__init__.py").write_text('"""The house."""\n')
    (package / "silent.py").write_text("x = 1\n")
    (package / "room/door.py").write_text('"""A door: v1.0\nopens, e.g. by hand. It closes, too.\n\nMore.\n"""\n')
    tree = generate_pages.source_tree(package).splitlines()
    assert [" ".join(line.split()) for line in tree] == [
        "```text",
        "house/ The house",
        "silent.py",
        "room/",
        "door.py A door: v1.0 opens, e.g. by hand",
        "```",
    ]


def layers() -> dict[str, int]:
    """Each package and top module of the diagram, and its layer."""
    found, numbers = {}, []
    for number, names in re.findall(r"^ *(\d*) \| ([\w/, ]+?) *\|[^|]+\|$", ARCHITECTURE, re.MULTILINE):
        numbers += [int(number)] if number else []  # else it goes on below its number
        found |= {name: numbers[-1] for name in names.split(", ")}
    assert numbers == list(range(10, -1, -1))
    return found


def test_the_diagram_has_every_package_and_module_and_no_other() -> None:
    named = layers()
    assert not [name for name in named if not (SOURCE / name).is_dir() and not (SOURCE / f"{name}.py").is_file()]
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        above = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
        assert parts[-1].startswith("__") or any(name in named for name in above), f"{path} has no layer"


def test_what_is_reserved_does_not_exist_yet() -> None:
    _, _, table = ARCHITECTURE.partition("## Reserved names")
    reserved = re.findall(r"^\| `([\w/]+)/` \|", table, re.MULTILINE)
    assert reserved == ["core/rows", "keyvalue", "data/streaming"]
    assert not [name for name in reserved if (SOURCE / name).exists()]


def test_the_path_of_a_gradient_is_a_numbered_list_of_files() -> None:
    _, _, path = ARCHITECTURE.partition("## The path of one gradient")
    steps = re.findall(r"^(\d+)\. \*\*", path.partition("\n## ")[0], re.MULTILINE)
    assert [int(step) for step in steps] == list(range(1, len(steps) + 1)) and len(steps) >= 10
    files = re.findall(r"\]\(\.\./(src/paceline/[\w/.]+)\)", path.partition("\n## ")[0])
    assert len(set(files)) >= 10 and not [name for name in files if not (ROOT / name).exists()]


def test_the_glossary_is_short_and_in_order() -> None:
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)[1:]
    assert 30 <= len(terms) <= MAX_TERMS and terms == sorted(terms, key=str.lower)
    assert len(terms) == len(page.strip().splitlines()) - 4, "a term is one line"
    assert "(glossary.md)" in ARCHITECTURE


def test_the_command_line_page_has_every_verb() -> None:
    from paceline.cli.main import VERBS

    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert not [verb for verb in VERBS if f"\n## paceline {verb}\n" not in page]
