"""Anonymous shared memory: a sealed memfd passed by descriptor, so that no name can be left behind. No torch here."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

import numpy as np

from paceline.errors import ProtocolError, UserError
from paceline.system.memory import _mib, available_memory, require_memory

PAGE = mmap.PAGESIZE


def page_aligned(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Segment:
    """A block of memory that several processes map; every page is reserved before use, so no write can fault."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.memory = mmap.mmap(fd, nbytes)

    @staticmethod
    def create(nbytes: int, purpose: str) -> Segment:
        """Reserve and seal a new segment; too little memory is a clear error, never a bus error."""
        nbytes = max(page_aligned(nbytes), PAGE)
        require_memory(nbytes, purpose)
        fd = os.memfd_create(f"paceline-{purpose}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return Segment(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise UserError(
                f"cannot reserve {_mib(nbytes)} of shared memory for the {purpose} ({error.strerror}): "
                f"{_mib(available_memory())} are free; use fewer workers or a smaller model"
            ) from None

    @staticmethod
    def attach(fd: int, nbytes: int) -> Segment:
        """Map a segment made by another process, after checking that it is whole and cannot shrink."""
        size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if size < nbytes or not seals & fcntl.F_SEAL_SHRINK:
            os.close(fd)
            raise ProtocolError(f"a shared segment of {nbytes} sealed bytes was promised, found {size} (seals {seals})")
        return Segment(fd, size)

    def array(self, shape: tuple[int, ...], dtype: Any, offset: int) -> np.ndarray[Any, Any]:
        """An array at `offset` bytes, sharing the memory."""
        return np.ndarray(shape, dtype, self.memory, offset)

    def close_descriptor(self) -> None:
        """Give the descriptor back; the mapping stays for as long as something uses it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
