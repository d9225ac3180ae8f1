"""The layers: who may import whom, what may not be imported early, and names that say nothing."""

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


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it; `from a import b` counts as a and as a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def imported_by(package: str) -> dict[str, set[str]]:
    return {dotted(path): imports_of(path) for path in SOURCES if within(dotted(path), package)}


def test_the_parser_of_imports_sees_what_is_there() -> None:
    assert "paceline.core.schedules" in imports_of(ROOT / "core" / "server.py")
    assert len(imported_by("paceline.core")) > 6


def test_core_imports_nothing_of_ours_but_interfaces() -> None:
    for module, imported in imported_by("paceline.core").items():
        ours = {name for name in imported if within(name, "paceline")}
        assert all(within(name, "paceline.interfaces", "paceline.core") for name in ours), module


@pytest.mark.parametrize("module", ["time", "random", "socket", "threading", "datetime", "os", "numpy", "secrets"])
def test_core_reads_no_clock_draws_no_number_and_opens_no_socket(module: str) -> None:
    for name, imported in imported_by("paceline.core").items():
        assert not any(within(found, module) for found in imported), name


@pytest.mark.parametrize("word", ["rand", "randn", "manual_seed", "randperm", "bernoulli", "normal_", "uniform_"])
def test_core_and_codecs_draw_no_random_tensor(word: str) -> None:
    for path in [*(ROOT / "core").rglob("*.py"), *(ROOT / "codecs").rglob("*.py")]:
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert word not in names, path.name


def test_interfaces_imports_nothing_of_ours() -> None:
    assert not any(within(name, "paceline") for name in imports_of(ROOT / "interfaces.py"))


def test_codecs_import_nothing_of_ours_but_interfaces_errors_and_the_hash() -> None:
    below = ("paceline.codecs", "paceline.interfaces", "paceline.errors", "paceline.models.dropout")
    codecs = imported_by("paceline.codecs")
    assert len(codecs) > 4
    for module, imported in codecs.items():
        assert all(within(name, *below) for name in imported if within(name, "paceline")), module


def test_reports_know_neither_runtimes_nor_core() -> None:
    reports = imported_by("paceline.reports")
    assert reports
    for module, imported in reports.items():
        assert not any(within(name, "paceline.runtimes", "paceline.core") for name in imported), module


@pytest.mark.parametrize("package", ["data", "models", "tasks", "core", "runs", "transports"])
def test_what_lies_below_does_not_import_the_runtimes_or_the_command_line(package: str) -> None:
    for module, imported in imported_by(f"paceline.{package}").items():
        above = ("paceline.runtimes", "paceline.cli.main", "paceline.launch", "paceline.reports")
        assert not any(within(name, *above) for name in imported), module


def test_no_module_has_a_name_that_says_nothing() -> None:
    empty = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "base"}
    assert not [dotted(path) for path in SOURCES if empty & set(dotted(path).split("."))]


@pytest.mark.parametrize(
    "module",
    [
        "paceline",
        "paceline.cli.main",
        "paceline.launch",
        "paceline.runtimes.local.supervisor",
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
