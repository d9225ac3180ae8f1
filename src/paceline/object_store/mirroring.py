"""The run's side of its copy in an object store: start the helper process, show what it says, wait for its end."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.interfaces import Report
from paceline.object_store.process import DISCARD, END
from paceline.runs.folder import RunFolder
from paceline.system.process import helper_command, helper_environment
from paceline.system.strict_json import from_json

START_SECONDS = 60.0
STALL_SECONDS = 60.0  # without a further part, after the end of the run
NOTICE_SECONDS = 1.0
POLL_SECONDS = 0.05


class StoreHelper:
    """A helper process of one verb; a thread reads its rows, and shows notes and progress."""

    def __init__(self, words: list[str], report: Report, output_file: Path | None = None) -> None:
        self._report, self._output_file = report, output_file
        self._errors: Any = output_file.open("w+b") if output_file is not None else tempfile.TemporaryFile()  # noqa: SIM115
        # In its own session: Ctrl-C is for the run, which then ends its helper.
        self.process = subprocess.Popen(
            helper_command("paceline.object_store.process", *words),
            env=helper_environment(),
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._answered = threading.Event()
        self.refusal: str | None = None
        self.state: dict[str, Any] = {}
        self.last: dict[str, Any] | None = None
        self.why = ""
        self.heard = time.monotonic()  # when a row came last
        self._is_ending = False
        self._thread = threading.Thread(target=self._read, name="paceline-store", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            row = from_json(line)
            self.heard = time.monotonic()
            match row["kind"]:
                case "ready":
                    self._answered.set()
                case "refused":
                    self.refusal = str(row["text"])
                    self._answered.set()
                case "state":
                    self.state = row
                    if self._is_ending:
                        self._show_state()
                case "failing":
                    self.why = str(row["text"])
                case "ended":
                    self.last = row
                case _:
                    self._report(row)
        was_ready = self._answered.is_set() and self.refusal is None
        self._answered.set()
        if self.process.wait() and was_ready and not self._is_ending:
            end = f"with code {self.process.returncode}{self._last_words()}"
            self._report({"kind": "note", "text": f"the process that copies the run ended {end}: the run goes on"})

    def _show_state(self) -> None:
        done, nbytes = self.state["done"], self.state["nbytes"]
        text = f"uploading the rest of the run: {done / 1e6:,.1f} of {nbytes / 1e6:,.1f} MB"
        self._report({"kind": "working", "text": text, "fraction": done / max(1, nbytes)})

    def wait_until_ready(self, what: str, seconds: float) -> None:
        """Block until the helper has done its first task; raise UserError if it is refused, or silent for so long."""
        while not self._answered.wait(POLL_SECONDS):
            if time.monotonic() > self.heard + seconds:
                self.kill()
                raise UserError(f"{what} did not answer for {seconds:g} s: check the URL, the network and credentials")
        if self.refusal is not None:
            self.kill()
            raise UserError(self.refusal)
        if self.process.poll() not in (None, 0):
            raise UserError(f"{what}: the helper process ended with code {self.process.returncode}{self._last_words()}")

    def order(self, word: str) -> None:
        """Tell the helper to end."""
        self._is_ending = True
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(word.encode())
            self.process.stdin.close()

    def wait(self) -> bool:
        """Wait for the end as long as there is progress; return False if it was killed."""
        self.heard = time.monotonic()
        while self.process.poll() is None:
            if time.monotonic() > self.heard + STALL_SECONDS:
                self.kill()
                return False
            time.sleep(POLL_SECONDS)
        self._thread.join()
        return True

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        self._thread.join()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f" ({lines[-1]})" if lines else ""

    def close(self) -> None:
        """Remove the file of its errors if there were none."""
        if self._output_file is not None and not self._last_words():
            with contextlib.suppress(OSError):
                self._output_file.unlink()
        self._errors.close()


@contextlib.contextmanager
def mirrored_to_store(folder: RunFolder, config: RunConfig, report: Report) -> Iterator[None]:
    """Copy the run folder to the config's store inside this context; at its end, wait for the last upload.

    A store that cannot be written is refused here, before anything is trained, and never ends the run later.
    """
    if config.mirror in (None, "none"):
        yield
        return
    url = f"{str(config.mirror).rstrip('/')}/{folder.path.name}"
    helper = StoreHelper(["mirror", str(folder.path), url], report, folder.path / "mirror.log")
    try:
        helper.wait_until_ready(url, START_SECONDS)
    except BaseException:
        helper.process.kill()
        folder.remove_copy_state()
        raise
    try:
        yield
    finally:
        _end(helper, folder, url, report)


def _end(helper: StoreHelper, folder: RunFolder, url: str, report: Report) -> None:
    """Wait for the last upload; say in one line what is not there. A signal ends the wait, not the command."""
    if folder.is_unstarted():
        helper.order(DISCARD)
    else:
        helper.order(END)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper.process.wait(NOTICE_SECONDS)
        if helper.process.poll() is None:
            report({"kind": "note", "text": f"waiting for the last upload to {url}; Ctrl-C ends the wait"})
        helper.wait()
        why = f" ({helper.why})" if helper.why else ""
    except KeyboardInterrupt:
        helper.kill()
        why = " (interrupted)"
    helper.close()
    if folder.is_unstarted():
        folder.remove_copy_state()
        return
    if helper.last is None or not helper.last["complete"]:
        left = helper.last or {"nbytes": helper.state.get("nbytes", 0) - helper.state.get("done", 0)}
        what = f"{left['nbytes'] / 1e6:,.1f} MB of it are missing" if left["nbytes"] else "its end is missing"
        again = f"'paceline export {folder.path} --to {url.rpartition('/')[0]}' copies the rest"
        report({"kind": "note", "text": f"{url} does not hold the whole run{why}: {what}; {again}"})


def copy_to_store(folder: RunFolder, base: str, report: Report) -> str:
    """Copy a run that is not being trained to the store `base`, and return its URL there."""
    url = f"{base.rstrip('/')}/{folder.path.name}"
    helper = StoreHelper(["mirror", str(folder.path), url], report)
    helper.wait_until_ready(url, START_SECONDS)
    helper.order(END)
    if not helper.wait() or helper.last is None or not helper.last["complete"]:
        raise UserError(f"{url} cannot be written ({helper.why or 'no answer'}): the copy is not complete")
    helper.close()
    return url


@contextlib.contextmanager
def fetched(url: str, runs: Path, report: Report, mode: str) -> Iterator[Path]:
    """Download a run into `runs`; on an error before it goes on, remove the copy again."""
    name = url.rstrip("/").rpartition("/")[2]
    target = runs / name
    if target.exists():
        what = f"{target} exists already on this machine"
        raise UserError(f"{what}: 'paceline resume {target}' goes on with it, or choose another folder with --runs DIR")
    helper = StoreHelper(["fetch", url, str(target), mode], report)
    try:
        helper.wait_until_ready(url, START_SECONDS)
    except BaseException:
        helper.process.kill()
        raise
    log = target / "arrivals.log"
    nbytes = log.stat().st_size if log.exists() else 0
    try:
        yield target
    except UserError:
        if log.exists() and log.stat().st_size == nbytes:
            shutil.rmtree(target)
        raise
