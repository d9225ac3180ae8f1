"""Measure the shape of a source tree: how much a reader has to open, and what has two names or two homes.

python tools/house.py                          # this checkout
python tools/house.py --before OTHER_CHECKOUT  # beside another one
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from pathlib import Path

import walk

NAMES = ("classic", "sync", "async", "backup", "bounded", "allreduce", "local", "diloco", "async-local")
Tree = dict[Path, ast.Module]


def measure(checkout: Path) -> dict[str, str]:
    """The figures of one checkout, by what they count."""
    package = checkout / "src/paceline"
    tree = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    modules = Counter(path.parent for path in tree if path.name != "__init__.py")
    largest = max((number, str(folder.relative_to(package))) for folder, number in modules.items() if folder != package)
    calls = walk.trace(checkout / "src")
    step = walk.in_order(calls["worker"] + calls["server"])
    exchange = [call for call in step if call[0].split("/")[0] not in walk.COMPUTING]
    command = {file for file, _ in calls["command"]}
    readme = (checkout / "README.md").read_text(encoding="utf-8").splitlines()
    return {
        "modules directly in src/paceline": str(modules[package]),
        "modules in the largest other package": f"{largest[0]} ({largest[1]})",
        "modules, and lines of src": f"{len(tree):,}, {sum(len(path.read_text().splitlines()) for path in tree):,}",
        "longest file, in lines": str(max(len(path.read_text().splitlines()) for path in tree)),
        "one exchange: functions / files": f"{len(exchange)} / {len({file for file, _ in exchange})}",
        "one gradient with its computation: functions / files": f"{len(step)} / {len({file for file, _ in step})}",
        "modules entered from cli to the first process": str(len(command)),
        "modules that sleep for an injected delay": str(len(sleepers(tree))),
        "modules that compare strategy names": str(len(comparers(tree))),
        "class names that mean two or more things": str(len(ambiguous(tree))),
        "lines of the README": str(len(readme)),
    }


def sleepers(tree: Tree) -> list[Path]:
    """Modules with a call of `time.sleep` on the seconds of a delay: the mark of a worker's loop."""
    return [path for path, module in tree.items() if any(_sleeps(node) for node in ast.walk(module))]


def _sleeps(node: ast.AST) -> bool:
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep"
    return called and ".seconds(" in ast.unparse(node)


def comparers(tree: Tree) -> list[Path]:
    """Modules that compare something with a strategy's name."""
    found = []
    for path, module in tree.items():
        compared = [node for node in ast.walk(module) if isinstance(node, ast.Compare)]
        literals = {leaf.value for node in compared for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
        if literals & (set(NAMES) - {"local"}):
            found.append(path)
    return found


def ambiguous(tree: Tree) -> list[str]:
    """Names of classes that are defined more than once."""
    classes = [node.name for module in tree.values() for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
    return [name for name, number in Counter(classes).items() if number > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, shown in a column of its own")
    options = parser.parse_args()
    after = measure(Path(__file__).resolve().parents[1])
    before = measure(options.before.resolve()) if options.before is not None else None
    print("| |" + (" before |" if before else "") + " after |\n|---|" + ("---|" if before else "") + "---|")
    for name, value in after.items():
        print(f"| {name} |" + (f" {before[name]} |" if before else "") + f" {value} |")


if __name__ == "__main__":
    main()
