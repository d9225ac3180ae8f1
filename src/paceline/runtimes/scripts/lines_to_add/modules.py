"""Read a user's script and the modules of its folder that it imports, without running them."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError

MAX_FILES = 200
MAX_NBYTES = 2_000_000


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A parsed file; `imports` maps a name in it to the file it comes from, and to the name there (none: all of it)."""

    path: Path
    text: str
    tree: ast.Module
    imports: dict[str, tuple[Path, str | None]]


def read_script(path: Path) -> SourceFile:
    """Parse the script; a syntax error is a UserError that names its line."""
    try:
        return _parse(path)
    except SyntaxError as error:
        at = f", line {error.lineno}" if error.lineno is not None else ""
        raise UserError(f"{path}{at}: {error.msg}: Python cannot read this script") from None
    except ValueError as error:  # a zero byte
        raise UserError(f"{path}: {error}: Python cannot read this script") from None


def with_helpers(script: SourceFile) -> list[SourceFile]:
    """The script and the files of its folder that it imports, directly or through each other."""
    folder = script.path.resolve().parent
    files, paths = [script], {script.path.resolve()}
    for file in files:
        for path in _imported_files(file, folder):
            if path in paths or len(files) >= MAX_FILES or path.stat().st_size > MAX_NBYTES:
                continue
            paths.add(path)
            try:
                files.append(_parse(path, folder))
            except (SyntaxError, ValueError, OSError):
                continue  # Python will tell, if the script gets that far
    return files


def imports_paceline(file: SourceFile) -> bool:
    """Whether the file imports Paceline anywhere, also by `importlib.import_module("paceline")`."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.level == 0 else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
        else:
            continue
        if any(name.partition(".")[0] == "paceline" for name in names):
            return True
    return False


def _parse(path: Path, folder: Path | None = None) -> SourceFile:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as an invalid escape: Python says it when it runs the script
        content = path.read_bytes()
        tree = ast.parse(content, str(path))
    text = content.decode("utf-8", errors="replace")
    imports = dict(_imports(tree, path.resolve(), folder or path.resolve().parent))
    return SourceFile(path, text, tree, imports)


def _imports(tree: ast.Module, path: Path, folder: Path) -> Iterator[tuple[str, tuple[Path, str | None]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found = _file_of(folder, alias.name)
                if found is not None:
                    yield alias.asname or alias.name, (found, None)
        elif isinstance(node, ast.ImportFrom):
            start = folder if node.level == 0 else path.parents[min(node.level, len(path.parents)) - 1]
            for alias in node.names:
                name = alias.asname or alias.name
                below = _file_of(start, ".".join(filter(None, (node.module, alias.name))))
                found = _file_of(start, node.module or "")
                if below is not None:
                    yield name, (below, None)
                elif found is not None:
                    yield name, (found, alias.name)


def _file_of(start: Path, module: str) -> Path | None:
    place = start.joinpath(*module.split(".")) if module else start
    for path in (place.with_name(place.name + ".py"), place / "__init__.py"):
        if path.is_file() and (module or path.name == "__init__.py"):
            return path
    return None


def _imported_files(file: SourceFile, folder: Path) -> list[Path]:
    """The files that an import of `file` runs: the modules, and the packages that they are in."""
    paths: dict[Path, None] = {}
    for path, _ in file.imports.values():
        parents = [parent for parent in path.parents if folder in parent.parents]
        packages = [parent / "__init__.py" for parent in reversed(parents)]
        paths |= dict.fromkeys([*(one for one in packages if one.is_file()), path])
    return list(paths)
