"""The manifest of a run in an object store: which objects its files consist of, with sizes and checksums.

It is written after all objects that it names, so that the newest one always describes a run that can be resumed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from paceline.system.strict_json import is_count, is_text, seal, to_json, unseal

FORMAT = 1
MAX_DEPTH, MAX_FILES = 4, 1_000_000
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Part:
    """A piece of a file, stored as one object."""

    offset: int
    nbytes: int
    sha256: str

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def object_name(self, prefix: str, file: str) -> str:
        """Return the object's name. It tells the content, so that no object is ever replaced by another."""
        return f"{prefix}/files/{file}/{self.offset:015d}-{self.sha256[:16]}"


Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Manifest:
    """All files of a run at one moment; `ended` says that its writer has closed it and writes no more."""

    generation: int
    files: dict[str, Parts]
    ended: bool = False

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.files.values() for part in parts)

    def to_bytes(self) -> bytes:
        """Return it as JSON with a checksum."""
        files = {name: [[part.nbytes, part.sha256] for part in parts] for name, parts in sorted(self.files.items())}
        value = {"format": FORMAT, "generation": self.generation, "ended": self.ended, "files": files}
        return to_json(seal(value), compact=True).encode()

    @staticmethod
    def from_bytes(content: bytes) -> Manifest:
        """Parse a manifest, which somebody else may have written; raise ValueError for all that is none."""
        value = unseal(content)
        if value.get("format") != FORMAT:
            raise ValueError(f"it is of format {value.get('format')}, this version reads {FORMAT}")
        files = value.get("files")
        if not is_count(value.get("generation")) or not isinstance(files, dict) or len(files) > MAX_FILES:
            raise ValueError("it lists no files")
        parsed = {require_safe_name(name): _parts(rows) for name, rows in files.items()}
        return Manifest(value["generation"], parsed, value.get("ended") is True)


def _parts(rows: Any) -> Parts:
    found, offset = [], 0
    if not isinstance(rows, list):
        raise ValueError("the parts of a file are no list")
    for row in rows:
        sound = isinstance(row, list) and len(row) == 2 and is_count(row[0]) and is_text(row[1])
        if not sound or not _SHA256.fullmatch(row[1]):
            raise ValueError("a part of a file has no size and checksum")
        found.append(Part(offset, row[0], row[1]))
        offset += row[0]
    return tuple(found)


def is_safe_name(name: str) -> bool:
    """Return whether a file of this name lies inside a run folder, under a name that is not hidden.

    >>> [is_safe_name(name) for name in ("checkpoints/000000000012/facts.json", "../x", "/x", ".ssh/x", "a//b")]
    [True, False, False, False, False]
    """
    parts = name.split("/")
    return len(parts) <= MAX_DEPTH and all(_NAME.fullmatch(part) for part in parts)


def require_safe_name(name: Any) -> str:
    """Return the name of a file in a manifest; raise ValueError for one that could lie outside of the folder."""
    if not is_text(name) or not is_safe_name(name) or is_private(name):
        raise ValueError(f"it names a file {str(name)[:80]!r}, which no run has")
    return str(name)


PRIVATE = frozenset({"token", "read-token", "tls", "requests", "mirror.json", "mirror.log"})
"""Files and folders of a run that stay on its machine: secrets, requests to it, and the state of its copy."""


def is_private(name: str) -> bool:
    """Return whether a file must not leave its machine, nor come from another one."""
    return name.partition("/")[0] in PRIVATE
