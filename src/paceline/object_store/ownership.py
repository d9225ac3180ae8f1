"""Who may write a remote run. Each writer has an epoch of its own: readers believe the newest one, so an older writer
that lives on changes nothing. It only writes and deletes objects below its own prefix.
"""

from __future__ import annotations

import re
import secrets
import socket
from dataclasses import asdict, dataclass

from paceline.errors import StoreFailed, UserError
from paceline.object_store.manifest import Manifest
from paceline.object_store.store import ObjectMissing, ObjectStore
from paceline.system.strict_json import is_count, is_text, require_types, seal, to_json, unseal

EPOCH_DIGITS, GENERATION_DIGITS = 8, 12
MAX_OWNER_NBYTES, MAX_MANIFEST_NBYTES = 10_000, 256 << 20
_WRITER = re.compile("[0-9a-f]{12}")


class Fenced(StoreFailed):
    """Another machine has taken over the remote run."""


@dataclass(frozen=True)
class Owner:
    """One writer of a remote run: its epoch, an id of its own, and its machine."""

    epoch: int
    writer: str
    host: str

    @property
    def prefix(self) -> str:
        """What the names of all its objects begin with."""
        return f"{self.epoch:0{EPOCH_DIGITS}d}-{self.writer}"

    def manifest_name(self, generation: int) -> str:
        return f"{self.prefix}/manifests/{generation:0{GENERATION_DIGITS}d}.json"


@dataclass(frozen=True)
class StoredRun:
    """The newest manifest of a remote run, by whom it was written, and the newest owner, who may have written none."""

    newest: Owner
    writer: Owner
    manifest: Manifest


def epochs_of(store: ObjectStore) -> list[int]:
    """Return the epochs of all owners so far, the newest first."""
    stems = [name.rpartition("/")[2].removesuffix(".json") for name in store.names("owners")]
    return sorted((int(stem) for stem in stems if stem.isdecimal() and len(stem) == EPOCH_DIGITS), reverse=True)


def owner_of(store: ObjectStore, epoch: int) -> Owner:
    """Read the owner of an epoch."""
    try:
        value = unseal(store.get(_owner_name(epoch), MAX_OWNER_NBYTES))
        require_types(value, {"epoch": is_count, "writer": is_text, "host": is_text})
        owner = Owner(value["epoch"], value["writer"], value["host"])
        if owner.epoch != epoch or not _WRITER.fullmatch(owner.writer):
            raise ValueError("it names another owner")
    except (ValueError, KeyError, TypeError) as error:
        raise StoreFailed(f"{store.url}/{_owner_name(epoch)} cannot be read ({error})") from None
    return owner


def newest_owner(store: ObjectStore) -> Owner | None:
    """Return the owner of the newest epoch; None if nobody has written here."""
    epochs = epochs_of(store)
    return owner_of(store, epochs[0]) if epochs else None


def find_run(store: ObjectStore) -> StoredRun | None:
    """Return the newest readable manifest; None if there is no run. Of an epoch without one, the one before counts."""
    newest: Owner | None = None
    complaint = ""
    for epoch in epochs_of(store):
        owner = owner_of(store, epoch)
        newest = newest or owner
        for name in reversed(store.names(f"{owner.prefix}/manifests")):
            try:
                return StoredRun(newest, owner, Manifest.from_bytes(store.get(name, MAX_MANIFEST_NBYTES)))
            except ObjectMissing:
                continue  # its writer has just replaced it
            except ValueError as error:
                complaint = complaint or f"{store.url}/{name} cannot be read ({error})"
    if complaint:
        raise UserError(f"{complaint}: the remote run is damaged")
    return None


def claim(store: ObjectStore, epoch: int) -> Owner:
    """Become the owner of `epoch`; refuse if another writer was faster."""
    owner = Owner(epoch, secrets.token_hex(6), socket.gethostname())
    written = store.create(_owner_name(epoch), to_json(seal(asdict(owner))).encode())
    if not written or owner_of(store, epoch) != owner:
        raise UserError(f"{store.url} was taken over by another machine at the same moment: let that one go on")
    return owner


def require_ownership(store: ObjectStore, owner: Owner) -> None:
    """Raise Fenced if somebody else owns the remote run by now."""
    now = newest_owner(store)
    if now is None:
        raise StoreFailed(f"{store.url} was deleted")
    if now != owner:
        raise Fenced(f"{now.host} has taken over {store.url}")


def _owner_name(epoch: int) -> str:
    return f"owners/{epoch:0{EPOCH_DIGITS}d}.json"
