"""`python -m paceline.object_store.process`: the process that copies a run to or from a store, beside the run.

Its output is JSON rows for the process that started it. Its input says when to end; its end, that the run is gone.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, StoreFailed
from paceline.interfaces import Report
from paceline.object_store.download import fetch_run
from paceline.object_store.ownership import Fenced
from paceline.object_store.store import ObjectStore
from paceline.object_store.takeover import require_idle, take_ownership
from paceline.object_store.upload import FolderUpload, UploadState
from paceline.system.strict_json import to_json
from paceline.system.terminal import seconds_text

PERIOD_SECONDS, MAX_REST_SECONDS = 2.0, 5.0
LAG_SECONDS, LOOK_SECONDS = 60.0, 1.0
MAX_DELAY_SECONDS = 30.0
GONE_SECONDS = 60.0  # for a last pass after the run was killed
LAST_TRIES, RETRY_SECONDS = 4, 0.5  # at the end of the run
NICENESS = 19
END, DISCARD = "end", "discard"
Wait = Callable[[float], str | None]


class MirrorLoop:
    """Repeats passes until the run has ended, and says in one line each when the store starts to fail or to lag."""

    def __init__(self, upload: FolderUpload, url: str, report: Report) -> None:
        self._upload, self._url, self._report = upload, url, report
        self._failures, self._says_kept = 0, False
        self._since = self._told = 0.0  # when the folder was last copied as a whole; whether a lag was reported
        self._delay = 0.0
        self._is_over = threading.Event()

    def run(self, wait: Wait) -> bool:
        """Copy until `wait` returns an order; then copy the rest, and return whether all of it is there."""
        self._since = time.monotonic()
        threading.Thread(target=self._watch, name="paceline-lag", daemon=True).start()
        try:
            while (order := wait(self._delay)) is None:
                self._pass()
            if order == DISCARD:
                self._upload.discard()
                return True
            return self._finish()
        except Fenced as error:
            self._note(f"{error}: nothing more of this run is copied, and it goes on here alone; stop it")
            self._since = float("inf")
            while wait(MAX_DELAY_SECONDS) is None:
                pass
            return True
        finally:
            self._is_over.set()

    def _pass(self) -> None:
        began = time.monotonic()
        try:
            done = self._upload.sync()
        except Fenced:
            raise
        except StoreFailed as error:
            self._failures += 1
            self._delay = min(MAX_DELAY_SECONDS, PERIOD_SECONDS * 2.0**self._failures)
            if self._failures == 1:
                self._note(f"{self._url} cannot be written ({error}): the run goes on, and the copy is tried again")
            return
        took = time.monotonic() - began
        self._delay = min(MAX_REST_SECONDS, max(PERIOD_SECONDS, took))  # a slow store is not kept busy all the time
        if done:
            self._caught_up(began)
        if self._upload.not_deleted and not self._says_kept:
            self._says_kept = True
            self._note(f"{self._url} keeps objects that are not needed any more ({self._upload.not_deleted})")

    def _caught_up(self, began: float) -> None:
        if self._failures:
            self._note(f"{self._url} works again: the copy is up to date")
        elif self._told:
            self._note(f"{self._url} has caught up with the run")
        self._failures, self._told, self._since = 0, 0.0, began

    def _watch(self) -> None:
        """Report a lag from another thread: the store may not answer at all."""
        while not self._is_over.wait(LOOK_SECONDS):
            behind = time.monotonic() - self._since
            if behind > LAG_SECONDS and not self._told and not self._failures:
                self._told = behind
                left = self._upload.state.nbytes - self._upload.state.done
                self._note(
                    f"{self._url} is {seconds_text(behind)} behind the run, {left / 1e6:,.1f} MB are on their way"
                )

    def _finish(self) -> bool:
        """Copy what is left, and close the manifest. Give up a store that refuses it several times."""
        for number in range(LAST_TRIES):
            try:
                if self._upload.sync(ended=True):
                    return True
            except Fenced:
                raise
            except StoreFailed as error:
                self._report({"kind": "failing", "text": str(error)})
            if number < LAST_TRIES - 1:
                time.sleep(RETRY_SECONDS * 2.0**number)
        return False

    def _note(self, text: str) -> None:
        self._report({"kind": "note", "text": text})


def speaker(output: int) -> Report:
    """Return a function that writes rows to the process that started this one, which may be gone."""

    def say(row: dict[str, Any]) -> None:
        try:
            os.write(output, to_json(row).encode() + b"\n")
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)

    return say


def _order(seconds: float) -> str | None:
    """Wait for an order of the parent; after its end, limit the time that is left."""
    ready, _, _ = select.select([0], [], [], seconds)
    if not ready:
        return None
    if (found := os.read(0, 100).decode().strip()) == "":
        signal.alarm(int(GONE_SECONDS))
    return found or END


def mirror(say: Report, folder: str, url: str) -> int:
    """Copy a run folder until its run has ended."""
    store = ObjectStore(url)

    def tell(state: UploadState) -> None:
        say({"kind": "state", "nbytes": state.nbytes, "done": state.done, "files": state.files})

    upload = FolderUpload(Path(folder), store, take_ownership(store, Path(folder)), tell)
    say({"kind": "ready"})
    complete = MirrorLoop(upload, url, say).run(_order)
    state = upload.state
    say({"kind": "ended", "complete": complete, "nbytes": state.nbytes - state.done, "files": state.files})
    return 0


def fetch(say: Report, url: str, folder: str, mode: str) -> int:
    """Download a run; with mode "resume", only if no other machine writes it."""
    store = ObjectStore(url)
    if mode == "resume":
        require_idle(store, say)
    fetch_run(store, Path(folder), say)
    say({"kind": "ready"})
    return 0


def main(verb: str, *words: str) -> int:
    """Run one verb; say why it was refused."""
    os.nice(NICENESS if verb == "mirror" else 0)
    say = speaker(os.dup(1))
    os.dup2(2, 1)  # what a library prints is no row
    try:
        return mirror(say, *words) if verb == "mirror" else fetch(say, *words)
    except PacelineError as error:
        what, url = str(error), words[0 if verb == "fetch" else 1]
        if isinstance(error, StoreFailed):
            what = f"{url} cannot be used ({what}): check the URL, the network and the credentials of the store"
        say({"kind": "refused", "text": what})
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
