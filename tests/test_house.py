"""The shape of the project: sizes of packages and files, unique class names, and how tests are written."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from pathlib import Path

import check_coverage
import pytest

import paceline

ROOT = Path(__file__).parents[1]
SOURCE = Path(paceline.__file__).parent
FILES = {path.relative_to(SOURCE): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
TESTS = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py"))}
MAX_MODULES, MAX_MODULES_AT_TOP, MAX_LINES = 12, 9, 400
README_LINES, README_COLUMNS = 200, 120
SAYS_NOTHING = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}


def test_no_package_has_too_many_modules() -> None:
    packages = defaultdict(list)
    for path in FILES:
        if path.name not in ("__init__.py", "__main__.py"):
            packages[str(path.parent)].append(path.stem)
    most = {name: MAX_MODULES_AT_TOP if name == "." else MAX_MODULES for name in packages}
    assert not {name: modules for name, modules in packages.items() if len(modules) > most[name]}


def test_no_source_file_is_too_long() -> None:
    lengths = {str(path): text.count("\n") for path, text in FILES.items()}
    assert not {path: length for path, length in lengths.items() if length > MAX_LINES}


def test_every_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for path, text in FILES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not [str(path) for path in FILES if SAYS_NOTHING & {path.stem, *path.parts}]


def test_every_json_text_is_strict() -> None:
    """`to_json` writes null for NaN; whoever calls json by itself forbids it."""
    loose = []
    for path in [*SOURCE.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tools").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("json.dump", "json.dumps"):
                continue
            if "allow_nan=False" not in map(ast.unparse, node.keywords) and path.name != "strict_json.py":
                loose.append(f"{path}:{node.lineno}")
    assert not loose


def test_the_readme_is_short_and_its_lines_fit() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= README_LINES
    assert not [line for line in lines if len(line) > README_COLUMNS]


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        (r"^\s*sys\.path\.(insert|append)\(", "pytest's pythonpath setting in pyproject.toml finds modules"),
        (r"^\s*(from|import) (tests\.)?([\w.]+\.)?test_", "what two tests share belongs in tests/support"),
        (r"^\s*assert .*time\.(monotonic|perf_counter)\(\) - \w+ <", "speeds are measured in benchmarks/"),
        (r"^\s+while .*:\n\s+time\.sleep\(", "wait with tests.support.waiting.until, which has a deadline"),
    ],
    ids=["sys.path", "imports", "times", "polls"],
)
def test_no_test_does_what_the_house_has_a_better_way_for(pattern: str, instead: str) -> None:
    found = [str(path) for path, text in TESTS.items() if re.search(pattern, text, re.MULTILINE)]
    assert not found, instead


@pytest.mark.parametrize(("branches", "code"), [(18, 0), (17, 1)])
def test_a_package_below_the_bound_fails_by_itself(tmp_path: Path, branches: int, code: int) -> None:
    """Lines and branches count together: 81 and 18 of 110 are 90 %."""
    whole = {"covered_lines": 10, "num_statements": 10, "covered_branches": 0, "num_branches": 0}
    some = {"covered_lines": 81, "num_statements": 85, "covered_branches": branches, "num_branches": 25}
    files = {f"src/paceline/{package}/a.py": {"summary": whole} for package in ("codecs", "transports")}
    files["src/paceline/core/rules/b.py"] = {"summary": some}
    (tmp_path / "report.json").write_text(json.dumps({"files": files}))
    assert check_coverage.main(str(tmp_path / "report.json")) == code
