"""The extras of pyproject.toml bring what the source imports beyond its dependencies, and messages name them."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from paceline.settings.imports import TRACKERS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/paceline"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DISTRIBUTIONS = {"PIL": "pillow", "opentelemetry": "opentelemetry-sdk"}
"""Packages whose name to install is not the one to import."""
NOT_OURS = {"triton", "datasets", "lightning", "transformers", "mlflow", "wandb"}
"""Brought by torch for GPUs, by the user's program that has the loop, or by who has an account with the tracker."""


def name_of(requirement: str) -> str:
    """The package of a requirement.

    >>> name_of("ray[train]>=2.60")
    'ray'
    """
    return re.split(r"[\[><=!~;]", requirement)[0].strip()


def packages_of(extra: str) -> set[str]:
    """The packages of an extra and of the extras that it names."""
    found = set()
    for requirement in EXTRAS[extra]:
        if name_of(requirement) == "paceline":
            named = re.findall(r"\[(.*)\]", requirement)[0].split(",")
            found |= set().union(*map(packages_of, named))
        else:
            found.add(name_of(requirement))
    return found


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports, also by `import_module("...")`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "find_spec")):
            found |= {one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return {name.partition(".")[0] for name in found}


def optional_packages() -> set[str]:
    """What some module of the source imports, and neither Python nor our dependencies bring."""
    names = set().union(*(imported(path) for path in SOURCE.rglob("*.py")))
    names |= {tracker.needs.partition(".")[0] for tracker in TRACKERS.values() if tracker.needs is not None}
    ours = {name_of(requirement) for requirement in PROJECT["dependencies"]} | {"paceline", "__future__"}
    return {DISTRIBUTIONS.get(name, name) for name in names - ours - NOT_OURS - sys.stdlib_module_names}


def test_all_brings_every_optional_package_of_the_source() -> None:
    assert optional_packages() == packages_of("all") - {"opentelemetry-exporter-otlp-proto-http"}


def test_make_setup_brings_what_draws_figures_reads_images_and_exports() -> None:
    assert {"matplotlib", "pillow", "tensorboard"} <= packages_of("dev")


def test_every_package_of_an_extra_has_a_pinned_version() -> None:
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {name for extra in EXTRAS for name in packages_of(extra)} - pinned == set()


@pytest.mark.parametrize("folder", ["src", "docs"])
def test_every_extra_named_in_a_message_exists_and_is_part_of_all(folder: str) -> None:
    paths = [path for ending in ("py", "md") for path in (ROOT / folder).rglob(f"*.{ending}")]
    named = {name for path in paths for name in re.findall(r"'paceline\[(\w+)\]'", path.read_text(encoding="utf-8"))}
    assert named and all(packages_of(name) <= packages_of("all") for name in named)


def test_a_message_about_a_missing_package_names_the_extra_that_brings_it() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    for extra in ("report", "images", "ray", "tensorboard", "otel", "store"):
        assert f"'paceline[{extra}]'" in text, extra
