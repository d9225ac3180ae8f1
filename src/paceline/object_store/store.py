"""An object store through fsspec: put, read, list and delete whole objects. Every failure of it is a StoreFailed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.errors import StoreFailed, UserError
from paceline.settings.imports import check_store
from paceline.system.terminal import printable

Found = TypeVar("Found")
MAX_LETTERS = 300


class ObjectMissing(StoreFailed):
    """There is no object of this name."""


class ObjectStore:
    """The objects below one URL, by names with slashes."""

    def __init__(self, url: str) -> None:
        check_store(url)
        self.url = url.rstrip("/")
        options = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
        try:
            core = importlib.import_module("fsspec.core")
            self._files, root = core.url_to_fs(self.url, use_listings_cache=False, **options)
        except Exception as error:  # of fsspec, of a driver or of a library below it
            raise UserError(f"{url} cannot be opened: {_in_words(error)}") from None
        self._root = str(root).rstrip("/")

    def put(self, name: str, content: bytes) -> None:
        """Write one object, or replace it."""
        self._try("write", name, lambda path: self._files.pipe_file(path, content))

    def create(self, name: str, content: bytes) -> bool:
        """Write one object unless there is one of this name; return whether it was written.

        Atomic if the store has conditional writes; otherwise the last of two writers at the same moment wins.
        """
        try:
            self._try("write", name, lambda path: self._files.pipe_file(path, content, mode="create"))
        except StoreFailed as error:
            if isinstance(error.__cause__, FileExistsError):
                return False
            raise
        return True

    def get(self, name: str, limit: int) -> bytes:
        """Read one object, or its first `limit` bytes; raise ObjectMissing if there is none."""
        return bytes(self._try("read", name, lambda path: self._files.cat_file(path, 0, limit)))

    def names(self, prefix: str) -> list[str]:
        """List the objects below `prefix`, sorted; empty if there are none."""

        def find(path: str) -> list[str]:
            self._files.invalidate_cache()
            return [str(found) for found in self._files.find(path)]

        try:
            found = self._try("list", prefix, find)
        except ObjectMissing:
            return []
        begin = self._files._strip_protocol(self._root) + "/"
        return sorted(name[len(begin) :] for name in found if name.startswith(begin))

    def delete(self, name: str) -> None:
        """Delete one object, if it is there."""
        try:
            self._try("delete", name, lambda path: self._files.rm_file(path))
        except ObjectMissing:
            return

    def _try(self, verb: str, name: str, do: Callable[[str], Found]) -> Found:
        try:
            return do(f"{self._root}/{name}")
        except FileNotFoundError as error:
            raise ObjectMissing(f"{verb} {name}: {_in_words(error)}") from error
        except Exception as error:  # drivers raise errors of many libraries
            raise StoreFailed(f"{verb} {name}: {_in_words(error)}") from error


def _in_words(error: Any) -> str:
    text = " ".join(str(error).split())
    return printable(f"{type(error).__name__}: {text}" if text else type(error).__name__, MAX_LETTERS)
