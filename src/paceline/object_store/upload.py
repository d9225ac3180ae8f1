"""Copies what is new in a run folder to an object store: parts first, then a manifest that names them.

A file is stored in parts. New bytes of a growing file take the parts before them back in that are not longer: a file
of n bytes has about n / 16 MiB parts, and no pass uploads more than about twice what is new, on average.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import StoreFailed
from paceline.object_store.folder_scan import LocalFile, Stamp, scan_folder
from paceline.object_store.manifest import Manifest, Part, Parts
from paceline.object_store.ownership import Owner, require_ownership
from paceline.object_store.store import ObjectStore

PART_NBYTES = 16 << 20
BEAT_SECONDS = 2.0


@dataclass(frozen=True)
class UploadState:
    """How far a pass is: bytes that are to be copied and that were, and the number of files with bytes to copy."""

    nbytes: int
    done: int
    files: int


class FolderUpload:
    """Copies one run folder to one store, as its owner; `tell` is called after each part."""

    def __init__(
        self,
        folder: Path,
        store: ObjectStore,
        owner: Owner,
        tell: Callable[[UploadState], None] = lambda _: None,
        part_nbytes: int = PART_NBYTES,
    ) -> None:
        self._folder, self._store, self._owner, self._tell = folder, store, owner, tell
        self._part_nbytes = part_nbytes
        self._parts: dict[str, Parts] = {}  # of all files whose objects are there, named in a manifest or not yet
        self._stamps: dict[str, Stamp] = {}
        self._manifest: Manifest | None = None
        self._stored: set[str] = set()  # every object of ours below the files
        self._garbage: set[str] = set()  # objects that the last two manifests do not name
        self._beats, self._next_beat = 0, 0.0
        self.state = UploadState(0, 0, 0)
        self.not_deleted = ""  # why an object that is not needed any more could not be deleted

    def sync(self, ended: bool = False) -> bool:
        """Copy what is new, and write a manifest of it; return False if the folder could not be looked at.

        Raise StoreFailed if the store fails: the next pass goes on from the parts that are there.
        """
        with ExitStack() as opened:
            files = scan_folder(self._folder, self._stamps, opened)
            if files is None:
                return False
            try:
                self._upload(files)
            except FileNotFoundError:  # replaced or removed since
                return False
        found = {file.name: self._parts[file.name] for file in files}
        if self._manifest is None or (found, ended) != (self._manifest.files, self._manifest.ended):
            self._commit(found, ended)
        else:
            self._beat()
        return True

    def _upload(self, files: list[LocalFile]) -> None:
        """Upload the parts that are missing, in the order of the files."""
        plans = [
            (file, kept, file.nbytes - (kept[-1].end if kept else 0)) for file in files for kept in [self._kept(file)]
        ]
        missing = sum(nbytes for _, _, nbytes in plans)
        self.state = UploadState(missing, 0, sum(nbytes > 0 for _, _, nbytes in plans))
        for file, parts, _ in plans:
            begin = parts[-1].end if parts else 0
            self._parts[file.name] = parts
            self._stamps.pop(file.name, None)
            while begin < file.nbytes:
                part = self._put(file, begin, min(self._part_nbytes, file.nbytes - begin))
                self._parts[file.name] = parts = (*parts, part)
                begin = part.end
                done = self.state.done + part.nbytes
                self.state = UploadState(missing, done, self.state.files - (begin == file.nbytes))
                self._tell(self.state)
                self._beat()
            self._stamps[file.name] = file.stamp

    def _kept(self, file: LocalFile) -> Parts:
        """Return the parts of a file that stay as they are."""
        parts = self._parts.get(file.name, ())
        if self._stamps.get(file.name) == file.stamp:
            return parts
        if not file.grows:
            return ()
        while parts and not self._is_unchanged(file, parts[-1]):
            parts = parts[:-1]  # a recovery has cut the file, and it has grown again
        new = file.nbytes - (parts[-1].end if parts else 0)
        while new and parts and parts[-1].nbytes <= new and parts[-1].nbytes < self._part_nbytes:
            new += parts[-1].nbytes
            parts = parts[:-1]
        return parts

    def _is_unchanged(self, file: LocalFile, part: Part) -> bool:
        if part.end > file.nbytes:
            return False
        return hashlib.sha256(file.read(self._folder, part.offset, part.nbytes)).hexdigest() == part.sha256

    def _put(self, file: LocalFile, begin: int, nbytes: int) -> Part:
        content = file.read(self._folder, begin, nbytes)
        part = Part(begin, nbytes, hashlib.sha256(content).hexdigest())
        name = part.object_name(self._owner.prefix, file.name)
        if name not in self._stored:
            self._store.put(name, content)
            self._stored.add(name)
        return part

    def _beat(self) -> None:
        """Show that the writer lives, during a long pass and if nothing is new."""
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_SECONDS
            self._beats += 1
            self._store.put(f"{self._owner.prefix}/alive", str(self._beats).encode())

    def _commit(self, files: dict[str, Parts], ended: bool) -> None:
        """Write the manifest, unless another machine has taken over; then delete what no manifest needs."""
        before = self._manifest
        generation = before.generation + 1 if before is not None else 0
        manifest = Manifest(generation, files, ended)
        require_ownership(self._store, self._owner)
        self._store.put(self._owner.manifest_name(generation), manifest.to_bytes())
        self._manifest = manifest
        self._parts = {name: parts for name, parts in self._parts.items() if name in files}
        self._stamps = {name: stamp for name, stamp in self._stamps.items() if name in files}
        try:
            self._clean(manifest)
        except StoreFailed as error:
            self.not_deleted = self.not_deleted or str(error)

    def _clean(self, manifest: Manifest) -> None:
        """Delete what neither this manifest nor the one before needs, for those who read that one."""
        prefix = self._owner.prefix
        needed = {part.object_name(prefix, name) for name, parts in manifest.files.items() for part in parts}
        doomed, self._garbage = self._garbage - needed, self._stored - needed
        for name in sorted(doomed):
            self._store.delete(name)
            self._stored.discard(name)
            self._garbage.discard(name)
        if manifest.generation == 0:
            self._delete_earlier_epochs()
        elif manifest.generation > 1:
            self._store.delete(self._owner.manifest_name(manifest.generation - 2))

    def _delete_earlier_epochs(self) -> None:
        """Remove the copies of earlier writers, which this one's first manifest replaces. Owners stay: they count."""
        for name in self._store.names(""):
            epoch = name.partition("-")[0]
            if epoch.isdecimal() and int(epoch) < self._owner.epoch:
                self._store.delete(name)

    def discard(self) -> None:
        """Remove the remote run again: it never started."""
        if self._owner.epoch == 1:
            for name in self._store.names(""):
                self._store.delete(name)
