"""Anonymous shared memory: a sealed memfd passed by descriptor, so that no file is left behind."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

import numpy as np

from paceline.errors import ProtocolError, UserError
from paceline.system.memory import available_memory, mib, require_memory

PAGE = mmap.PAGESIZE


def page_aligned(nbytes: int) -> int:
    """Round `nbytes` up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Segment:
    """A block of memory that several processes map; all pages are reserved at creation, so no write can fail."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes, self.memory = fd, nbytes, mmap.mmap(fd, nbytes)

    @staticmethod
    def create(nbytes: int, purpose: str) -> Segment:
        """Reserve and seal a new segment; raise UserError if there is too little memory (never a bus error later)."""
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
                f"cannot reserve {mib(nbytes)} of shared memory for the {purpose} ({error.strerror}): "
                f"{mib(available_memory())} are free; use fewer workers or a smaller model"
            ) from None

    @staticmethod
    def attach(fd: int, nbytes: int) -> Segment:
        """Map a segment of another process; raise ProtocolError if it is too small or can shrink."""
        size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if size < nbytes or not seals & fcntl.F_SEAL_SHRINK:
            os.close(fd)
            raise ProtocolError(f"expected a sealed shared segment of {nbytes} bytes, found {size} (seals {seals})")
        return Segment(fd, size)

    def array(self, shape: tuple[int, ...], dtype: Any, offset: int) -> np.ndarray[Any, Any]:
        """Return an array at `offset` bytes that shares the memory."""
        return np.ndarray(shape, dtype, self.memory, offset)

    def close_descriptor(self) -> None:
        """Close the descriptor; the mapping stays valid as long as it is used."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
