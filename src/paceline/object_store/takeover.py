"""Whether this machine may go on with a remote run: not while another one writes it, nor from an older state of it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.interfaces import Report
from paceline.object_store.ownership import Owner, StoredRun, claim, epochs_of, find_run, owner_of
from paceline.object_store.store import ObjectMissing, ObjectStore
from paceline.runs.durable_files import write_atomically
from paceline.system.strict_json import is_count, is_text, require_types, seal, to_json, unseal

STATE_FILE = "mirror.json"
ALIVE_SECONDS = 10.0  # how long to watch whether a remote run is still written
POLL_SECONDS = 1.0
MAX_ALIVE_NBYTES = 100


@dataclass(frozen=True)
class CopyState:
    """What a local folder and a remote run have in common: the newest epoch, and which manifest the folder came from.

    Without a generation the folder is the original, and `writer` its last writer.
    """

    url: str
    epoch: int
    writer: str
    generation: int | None = None

    def save(self, folder: Path) -> None:
        """Keep it in the run folder, beside those of other stores; it stays on this machine."""
        states = {**_states(folder), self.url: self}
        value = {"copies": [asdict(state) for state in states.values()]}
        write_atomically(folder / STATE_FILE, to_json(seal(value)).encode())

    @staticmethod
    def load(folder: Path, url: str) -> CopyState | None:
        """Read the state of one copy; None if the folder was never copied there."""
        return _states(folder).get(url)


def _states(folder: Path) -> dict[str, CopyState]:
    found = {}
    try:
        for row in unseal((folder / STATE_FILE).read_bytes())["copies"]:
            require_types(row, {"url": is_text, "epoch": is_count, "writer": is_text, "generation": is_count})
            found[row["url"]] = CopyState(**row)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / STATE_FILE} cannot be read ({error}): remove it to copy the run anew") from None
    return found


def require_run(store: ObjectStore) -> StoredRun:
    """Return the newest state of a remote run; refuse a URL without one."""
    run = find_run(store)
    if run is None:
        raise UserError(f"{store.url} holds no run: give the URL of one, as in s3://BUCKET/runs/NAME")
    return run


def require_idle(store: ObjectStore, report: Report, seconds: float = ALIVE_SECONDS) -> None:
    """Refuse a remote run that another machine still writes: watch it for so long, unless it was closed."""
    run = require_run(store)
    if run.manifest.ended and run.newest == run.writer:
        return
    report({"kind": "note", "text": f"watching for {seconds:g} s whether {run.newest.host} still writes {store.url}"})
    first, until = _pulse(store), time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(min(POLL_SECONDS, seconds / 4))
        if _pulse(store) != first:
            what = f"{store.url} is being written by {run.newest.host}"
            raise UserError(f"{what}: stop the run there first, or add --take-over to go on here without asking it")


def _pulse(store: ObjectStore) -> tuple[StoredRun, bytes]:
    """Return what changes as long as a writer lives."""
    run = require_run(store)
    try:
        return run, store.get(f"{run.newest.prefix}/alive", MAX_ALIVE_NBYTES)
    except ObjectMissing:
        return run, b""


def take_ownership(store: ObjectStore, folder: Path) -> Owner:
    """Become the writer of the remote run of this folder; refuse if the store holds another run, or a later state."""
    state, epochs = CopyState.load(folder, store.url), epochs_of(store)
    if state is None and epochs and find_run(store) is not None:  # else another one was killed before its first pass
        raise UserError(f"{store.url} exists already: choose another --name, or 'paceline resume {store.url}'")
    if state is not None and epochs:
        _require_newest(store, state, epochs[0])
    owner = claim(store, epochs[0] + 1 if epochs else 1)
    CopyState(store.url, owner.epoch, owner.writer).save(folder)
    return owner


def _require_newest(store: ObjectStore, state: CopyState, newest: int) -> None:
    """Refuse a local folder that is older than the remote run: it would replace what another machine has trained."""
    if newest != state.epoch:
        where = f"{owner_of(store, newest).host} has gone on with {store.url}"
        raise UserError(f"{where}: resume that URL into another --runs DIR, or add --mirror none to go on here alone")
    run = find_run(store)
    if run is None or state.generation is None:
        return
    if (run.writer.writer, run.manifest.generation) != (state.writer, state.generation):
        raise UserError(f"{run.newest.host} still writes {store.url}: stop the run there first, then resume again")
