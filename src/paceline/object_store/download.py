"""Brings a run from an object store to this machine: every part is checked against the manifest.

What comes from a store may be damaged or hostile: names are checked, and nothing is used before all of it is there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from paceline.errors import StoreFailed, UserError
from paceline.interfaces import Report
from paceline.object_store.manifest import Parts
from paceline.object_store.ownership import StoredRun
from paceline.object_store.store import ObjectMissing, ObjectStore
from paceline.object_store.takeover import CopyState, require_run
from paceline.runs.durable_files import sync_folder

MAX_ATTEMPTS = 5


def fetch_run(store: ObjectStore, target: Path, report: Report) -> CopyState:
    """Download a run into the new folder `target`, and check everything."""
    staging = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    for _ in range(MAX_ATTEMPTS):
        run = require_run(store)
        shutil.rmtree(staging, ignore_errors=True)
        try:
            staging.mkdir(parents=True)
            _download(store, run, staging, report)
            state = CopyState(store.url, run.newest.epoch, run.writer.writer, run.manifest.generation)
            state.save(staging)
            staging.rename(target)
            sync_folder(target.parent)
            return state
        except ObjectMissing as error:
            if require_run(store) == run:
                raise UserError(
                    f"{store.url} is damaged: an object that its manifest names is missing ({error})"
                ) from None
        except OSError as error:
            raise UserError(f"{target} cannot be written: {error.strerror}; choose another --runs DIR") from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    raise StoreFailed(f"{store.url} changes faster than it can be read: stop the run that writes it, or try again")


def _download(store: ObjectStore, run: StoredRun, folder: Path, report: Report) -> None:
    total = run.manifest.nbytes
    if total > (free := shutil.disk_usage(folder).free):
        raise UserError(f"{store.url} has {total / 1e6:,.0f} MB, and {folder.parent} has room for {free / 1e6:,.0f} MB")
    done, skipped = 0, set[str]()

    def tell(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report(
            {
                "kind": "working",
                "text": f"downloading {store.url}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB",
                "fraction": done / max(1, total),
            }
        )

    for name, parts in sorted(run.manifest.files.items()):
        place = name.rpartition("/")[0]
        if place in skipped:
            continue
        try:
            _download_file(store, run.writer.prefix, name, parts, folder, tell)
        except DamagedPart as error:
            if not place.startswith("checkpoints/"):
                raise UserError(
                    f"{store.url} is damaged: {error}; restore that object, or start the run again"
                ) from None
            report({"kind": "note", "text": f"{store.url} is damaged: {error}; an older checkpoint is used"})
            skipped.add(place)
            shutil.rmtree(folder / place)


class DamagedPart(StoreFailed):
    """An object is not what the manifest says."""


def _download_file(
    store: ObjectStore, prefix: str, name: str, parts: Parts, folder: Path, tell: Callable[[int], None]
) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        for part in parts:
            content = store.get(part.object_name(prefix, name), part.nbytes + 1)
            if len(content) != part.nbytes or hashlib.sha256(content).hexdigest() != part.sha256:
                what = f"{part.nbytes} bytes from byte {part.offset} of {name}"
                raise DamagedPart(f"{what} have another length or checksum than the manifest says")
            file.write(content)
            tell(part.nbytes)
        file.flush()
        os.fsync(file.fileno())
