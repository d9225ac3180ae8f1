"""A store for benchmarks and tests, `odd://PATH`: files of a folder, which waits or fails as a control file says.

`environment_for(place)` makes every process know it; `control(place, ...)` tells it what to do.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

CONTROL = "ODD_STORE_CONTROL"
SITE = 'import fsspec\nfsspec.register_implementation("odd", "odd_store.OddFileSystem")\n'


class OddFileSystem(LocalFileSystem):
    """Whole objects in files; each call sleeps, and each write fails, if the control file says so."""

    protocol = "odd"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("odd://")))

    def _obey(self, writes: bool) -> None:
        wanted = json.loads(Path(os.environ[CONTROL]).read_text())
        time.sleep(wanted["seconds"])
        if writes and wanted["fails"]:
            raise PermissionError(13, "the credentials have expired")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._obey(writes=True)
        super().pipe_file(path, value, mode=mode, **options)

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._obey(writes=False)
        return super().cat_file(path, *arguments, **options)


def control(place: Path, seconds: float = 0.0, fails: bool = False) -> None:
    """Tell the store of `place` how long every call takes, and whether writes fail."""
    temporary = place / "control.tmp"
    temporary.write_text(json.dumps({"seconds": seconds, "fails": fails}, allow_nan=False))
    temporary.replace(place / "control.json")


def environment_for(place: Path) -> dict[str, str]:
    """Return variables with which `odd://` works in every process; `place` keeps the control file."""
    (place / "site").mkdir(exist_ok=True)
    (place / "site" / "sitecustomize.py").write_text(SITE)
    control(place)
    paths = [str(place / "site"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), CONTROL: str(place / "control.json")}
