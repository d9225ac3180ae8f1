"""Find and load what a name stands for: own code (MODULE:NAME or FILE.py:NAME), a tracker, an object store."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from paceline.errors import UserError, unknown_name

MAIN_MODULE = "__paceline_main__"


def split_name(kind: str, text: str, wanted: str = "FUNCTION") -> tuple[str, str]:
    """Split a name into the module or file, and the name in it."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise UserError(f"{kind} '{text}': write MODULE:{wanted} or FILE.py:{wanted}")
    return where, name


def _no_module(kind: str, text: str, module: str, wanted: str) -> UserError:
    return UserError(f"{kind} '{text}': no module '{module}'; run from its folder or give FILE.py:{wanted}")


def make_own(kind: str, text: str, wanted: str = "FUNCTION") -> Any:
    """Load the function or class of that name and call it without arguments; `kind` names its use in messages."""
    where, name = split_name(kind, text, wanted)
    try:
        if where.endswith(".py"):
            build = getattr(_module_from_file(kind, Path(where)), name, None)
        else:
            build = getattr(_module_by_name(kind, where, text, wanted), name, None)
        if not callable(build):
            raise UserError(f"{kind} '{text}': {where} has no {wanted.lower()} '{name}'")
        require_no_arguments(kind, text, build)
        return build()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{kind} '{text}' cannot be built: {in_a_line(error)}") from error


def require_no_arguments(kind: str, text: str, build: Callable[..., Any]) -> None:
    """Raise UserError if a function or class of the user's cannot be called without arguments."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if needed := [one.name for one in parameters if one.default is one.empty and one.kind not in optional]:
        raise UserError(f"{kind} '{text}' needs {' and '.join(needed)}, but is called without: give them defaults")


def in_a_line(error: BaseException) -> str:
    """Describe an exception of the user's code, with file and line."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({Path(line.filename).name}, line {line.lineno})"


def _module_by_name(kind: str, name: str, text: str, wanted: str) -> ModuleType:
    here = str(Path.cwd())
    if _is_here(name) and not {"", here} & set(sys.path):  # the command itself looks for nothing in that folder
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise _no_module(kind, text, name, wanted) from None
        raise


def _module_from_file(kind: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{kind} file {path} does not exist")
    for name in ("__main__", MAIN_MODULE):
        loaded = sys.modules.get(name)
        file = getattr(loaded, "__file__", None)
        if loaded is not None and file is not None and Path(file).resolve() == path.resolve():
            return loaded
    spec = importlib.util.spec_from_file_location(MAIN_MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MAIN_MODULE] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def require_found(kind: str, text: str, wanted: str = "FUNCTION") -> None:
    """Check that the file or the module exists, without loading it."""
    where, _ = split_name(kind, text, wanted)
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise UserError(f"{kind} file {where} does not exist")
        return
    if not _is_here(where) and not is_installed(where.partition(".")[0]):
        raise _no_module(kind, text, where, wanted)


def _is_here(module: str) -> bool:
    """Whether a module, or the package it is in, is in the current folder."""
    top = module.partition(".")[0]
    return any(Path(os.curdir, top + ending).exists() for ending in ("", ".py"))


def is_installed(module: str) -> bool:
    """Whether a module can be found, without loading it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


class BuiltInTracker(NamedTuple):
    """A built-in tracker: its class, the package that it needs, and what to install for it."""

    home: str
    needs: str | None = None
    install: str | None = None


TRACKERS = {
    "csv": BuiltInTracker("paceline.tracking.backends:CsvFile"),
    "tensorboard": BuiltInTracker("paceline.tracking.backends:TensorBoard", "tensorboard", "'paceline[tensorboard]'"),
    "mlflow": BuiltInTracker("paceline.tracking.backends:MLflow", "mlflow", "mlflow"),
    "wandb": BuiltInTracker("paceline.tracking.backends:Wandb", "wandb", "wandb"),
    "otel": BuiltInTracker(
        "paceline.tracking.otel:OpenTelemetry", "opentelemetry.exporter.otlp.proto.http", "'paceline[otel]'"
    ),
}


def check_tracker(name: str) -> None:
    """Check the name of a tracker without loading anything."""
    if ":" in name:
        require_found("tracker", name, "CLASS")
        return
    if name not in TRACKERS:
        raise unknown_name("tracker", name, (*TRACKERS, "MODULE:CLASS"))
    needs, install = TRACKERS[name].needs, TRACKERS[name].install
    if needs is not None and not is_installed(needs):
        raise UserError(f"tracker {name} needs the package {needs}, which is not installed: pip install {install}")


STORE_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
}
"""Packages that fsspec needs for a kind of store, besides itself."""
LOCAL_STORES = ("memory",)  # they end with the process that writes them


def check_store(url: str) -> None:
    """Check the URL of an object store without loading anything."""
    protocol, is_url, place = url.partition("://")
    example = "as in s3://BUCKET/runs, gs://BUCKET/runs or file:///mnt/share/runs"
    if not is_url or not place.strip("/") or "::" in url or any(letter in url for letter in "*?[]# "):
        raise UserError(f"'{url}' is not the URL of an object store: write PROTOCOL://PLACE, {example}")
    user = place.partition("/")[0].rpartition("@")[0]
    if ":" in user:
        raise UserError(f"a {protocol} URL with a password would be kept in config.toml: use the store's own settings")
    packages = [name for name in ("fsspec", STORE_PACKAGES.get(protocol)) if name is not None]
    if missing := [name for name in packages if not is_installed(name)]:
        install = " ".join(["'paceline[store]'", *(name for name in missing if name != "fsspec")])
        needs = f"needs the package {' and '.join(missing)}, which is not installed"
        raise UserError(f"{protocol}:// {needs}: pip install {install}")


def check_mirror(url: str | None) -> None:
    """Check the store that a run is copied to, if there is one."""
    if url in (None, "none"):
        return
    check_store(str(url))
    if (protocol := str(url).partition("://")[0]) in LOCAL_STORES:
        raise UserError(f"--mirror {url}: what is in {protocol}:// ends with the process that writes it; use file://")
