"""The layers: what may import what, what must not be imported early, and names that say nothing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))

LAYERS = {
    "errors": 0,
    "interfaces": 0,
    "randomness": 0,
    "config": 1,
    "system": 1,
    "codecs": 2,
    "core": 2,
    "data": 2,
    "models": 2,
    "settings": 2,
    "runs": 3,
    "tasks": 3,
    "transports": 3,
    "analysis": 4,
    "assembly": 4,
    "object_store": 4,
    "tracking": 4,
    "runtimes.server": 5,
    "runtimes.worker_loop": 5,
    "reports": 6,
    "runtimes.local": 6,
    "runtimes.ring": 6,
    "runtimes.sharded": 6,
    "simulation": 6,
    "runtimes.cluster": 7,
    "runtimes.scripts": 7,
    "simulation.lab": 7,
    "simulation.soak": 7,
    "integrations": 8,
    "launch": 8,
    "api": 9,
    "studies": 9,
    "cli": 10,
}
"""A module imports from its own layer or a lower one; packages of one layer import each other in no circle."""

NARROWER = {
    "core": {"interfaces", "core"},
    "codecs": {"errors", "interfaces", "randomness", "codecs"},
    "reports": {
        "errors",
        "interfaces",
        "config",
        "system",
        "settings",
        "data",
        "runs",
        "transports",
        "analysis",
        "reports",
    },
}
"""Packages that may import less than their layer allows."""

PACKAGE_ROOTS = {"", "__main__"}
"""`paceline` itself and `python -m paceline`: above every layer, imported by none."""


def dotted(path: Path) -> str:
    """The name of a module inside the package: `core.server`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in SOURCES}


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, also lazily or for typing; `from a import b` is a.b if that is a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name.removeprefix("paceline.") in MODULES else node.module)
    return found


def ours(path: Path) -> set[str]:
    """What a file imports of this package, without the leading `paceline.`."""
    return {name.partition(".")[2] for name in imports_of(path) if name.split(".")[0] == "paceline"}


def room(module: str) -> str:
    """The entry of the table that a module belongs to: the longest that its name begins with."""
    names = [name for name in LAYERS if module == name or module.startswith(f"{name}.")]
    assert names, f"{module} is in no layer: add it to the table"
    return max(names, key=len)


PLACED = {module: path for module, path in MODULES.items() if module not in PACKAGE_ROOTS and module != "runtimes"}
EDGES = {(module, name) for module, path in PLACED.items() for name in ours(path)}


def test_the_parser_of_imports_sees_what_is_there() -> None:
    assert "core.schedules" in {name for module, name in EDGES if room(module) == "core"}
    assert ("launch", "runtimes.local.run") in EDGES, "lazy imports count too"
    assert len(EDGES) > 1000


def test_no_module_imports_from_a_higher_layer() -> None:
    upward = [f"{module} -> {name}" for module, name in sorted(EDGES) if LAYERS[room(name)] > LAYERS[room(module)]]
    assert not upward


def test_packages_import_each_other_in_no_circle() -> None:
    below = {name: {room(b) for a, b in EDGES if room(a) == name} - {name} for name in LAYERS}
    order: list[str] = []
    while len(order) < len(below):
        free = [name for name in below if name not in order and below[name] <= set(order)]
        assert free, f"a circle among {sorted(set(below) - set(order))}"
        order += free


def test_modules_import_each_other_in_no_circle() -> None:
    below = {module: {name for a, name in EDGES if a == module} & set(PLACED) for module in PLACED}
    order: set[str] = set()
    while len(order) < len(below):
        free = {module for module in below if module not in order and below[module] - {module} <= order}
        assert free, f"a circle among {sorted(set(below) - order)}"
        order |= free


@pytest.mark.parametrize("package", sorted(NARROWER))
def test_some_packages_import_less_than_their_layer_allows(package: str) -> None:
    wide = [f"{a} -> {b}" for a, b in sorted(EDGES) if room(a) == package and room(b) not in NARROWER[package]]
    assert not wide


@pytest.mark.parametrize("module", ["time", "random", "socket", "threading", "datetime", "os", "numpy", "secrets"])
def test_core_reads_no_clock_draws_no_number_and_opens_no_socket(module: str) -> None:
    for name, path in PLACED.items():
        if room(name) == "core":
            assert module not in {found.split(".")[0] for found in imports_of(path)}, name


@pytest.mark.parametrize("word", ["rand", "randn", "manual_seed", "randperm", "bernoulli", "normal_", "uniform_"])
def test_core_and_codecs_draw_no_random_tensor(word: str) -> None:
    for path in [*(ROOT / "core").rglob("*.py"), *(ROOT / "codecs").rglob("*.py")]:
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert word not in names, path.name


@pytest.mark.parametrize(
    "module",
    [
        "paceline",
        "paceline.cli.main",
        "paceline.launch",
        "paceline.runtimes.local.run",
        "paceline.assembly.core",
        "paceline.settings.resolve",
        "paceline.settings.strategies",
        "paceline.settings.codecs",
        "paceline.runtimes.cluster.ssh_launch",
        "paceline.runtimes.cluster.rank_star",
        "paceline.runtimes.cluster.ray",
    ],
)
def test_torch_is_not_imported_before_it_is_needed(module: str) -> None:
    """A mistake on the command line must be answered at once, and torch takes seconds."""
    script = f"import sys, {module}; print('torch' in sys.modules or 'ray' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
