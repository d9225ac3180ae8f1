"""A consistent view of a run folder that is being written: each file's length, in an order that makes a valid prefix.

A checkpoint is looked at before the log that it refers to, and the log before the values of its pushes: what one file
refers to is then in the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paceline.object_store.manifest import is_private, is_safe_name

MAX_ATTEMPTS = 5
Stamp = tuple[int, int, int]
_GROWING = re.compile(r"arrivals\.log|events\.jsonl|pushes-\d+\.bin")
_DERIVED = re.compile(r"tensorboard/.*|metrics\.csv|track-.*\.log|trace\.json(\.gz)?|replay-\d+\.safetensors|.*\.tmp")
_SET_ASIDE = re.compile(r".*\.(damaged|unused)(/.*)?")


@dataclass(frozen=True)
class LocalFile:
    """One file of a run folder. `stamp` is another if it was replaced; a file that `grows` is only appended to."""

    name: str
    nbytes: int
    stamp: Stamp
    grows: bool
    descriptor: int | None  # open if the file may be removed before it is read

    def read(self, folder: Path, offset: int, nbytes: int) -> bytes:
        """Read a piece; raise FileNotFoundError if the file was replaced or is shorter now."""
        descriptor = self.descriptor
        with ExitStack() as opened:
            if descriptor is None:
                descriptor = os.open(folder / self.name, os.O_RDONLY | os.O_NOFOLLOW)
                opened.callback(os.close, descriptor)
                if _stamp(os.fstat(descriptor)) != self.stamp:
                    raise FileNotFoundError(f"{self.name} was replaced")
            content = bytearray()
            while len(content) < nbytes and (
                piece := os.pread(descriptor, nbytes - len(content), offset + len(content))
            ):
                content += piece
        if len(content) != nbytes:
            raise FileNotFoundError(f"{self.name} is shorter now")
        return bytes(content)


def scan_folder(folder: Path, known: Mapping[str, Stamp], opened: ExitStack) -> list[LocalFile] | None:
    """Return the files to copy, those of `known` stamps unopened; None if the run replaces files all the time.

    Files that the run may remove are opened; `opened` closes them.
    """
    for _ in range(MAX_ATTEMPTS):
        before = _names(folder)
        with ExitStack() as attempt:
            try:
                found = [_look(folder, name, known.get(name), attempt) for name in sorted(before, key=_order)]
            except FileNotFoundError:
                continue
            if _names(folder) == before:  # no checkpoint came or went: the files belong together
                opened.push(attempt.pop_all())
                return found
    return None


def _look(folder: Path, name: str, known: Stamp | None, opened: ExitStack) -> LocalFile:
    grows = _GROWING.fullmatch(name) is not None
    facts = os.lstat(folder / name)
    if _stamp(facts) == known and not grows:
        return LocalFile(name, facts.st_size, known, grows, None)
    if not grows and not name.startswith("checkpoints/"):
        return LocalFile(name, facts.st_size, _stamp(facts), grows, None)
    descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW)
    opened.callback(os.close, descriptor)
    facts = os.fstat(descriptor)
    return LocalFile(name, facts.st_size, _stamp(facts), grows, descriptor)


def _stamp(facts: os.stat_result) -> Stamp:
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def _order(name: str) -> tuple[int, str]:
    """Sort key: files that refer to others first, those with what they refer to last."""
    if name == "arrivals.log":
        return 1, name
    if name.startswith("pushes-"):
        return 2, name
    return (3 if name == "events.jsonl" else 0), name


def _names(folder: Path) -> set[str]:
    """Return the names of all files to copy, relative to the folder."""
    found: set[str] = set()
    for place, folders, files in os.walk(folder):
        base = os.path.relpath(place, folder)
        prefix = "" if base == "." else f"{base}/"
        folders[:] = [one for one in folders if is_copied(f"{prefix}{one}")]
        found |= {f"{prefix}{one}" for one in files if is_copied(f"{prefix}{one}")}
    return {name for name in found if not (folder / name).is_symlink()}


def is_copied(name: str) -> bool:
    """Return whether a file or folder belongs to the copy: no secret, nothing unfinished, derived or set aside.

    >>> [is_copied(name) for name in ("result.json", "token", ".a.tmp", "metrics.csv", "checkpoints/007.unused")]
    [True, False, False, False, False]
    """
    is_left_out = _DERIVED.fullmatch(name) or _DERIVED.fullmatch(f"{name}/") or _SET_ASIDE.fullmatch(name)
    return is_safe_name(name) and not is_private(name) and not is_left_out
