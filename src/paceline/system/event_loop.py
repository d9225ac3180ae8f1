"""A small event loop over epoll: a callback for each file descriptor, one thread."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable
from typing import Protocol


class Pollable(Protocol):
    """An object with a file descriptor; a negative one means that it is closed."""

    def fileno(self) -> int: ...


class Writable(Pollable, Protocol):
    """A pollable that may have bytes left to send."""

    @property
    def wants_write(self) -> bool: ...


class EventLoop:
    """Calls back when a descriptor can be read and, if its owner has bytes left to send, when it can be written."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._writing: set[int] = set()
        self._soon: deque[Callable[[], None]] = deque()

    def register(self, pollable: Pollable, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `pollable` can be read."""
        self._callbacks[pollable.fileno()] = callback
        self._poll.register(pollable.fileno(), select.EPOLLIN)

    def unregister(self, pollable: Pollable) -> None:
        """Stop watching `pollable`; does nothing if it is closed. Call this before closing it."""
        number = pollable.fileno()
        if number >= 0:
            self._poll.unregister(number)
            self._writing.discard(number)
            del self._callbacks[number]

    def watch_writes(self, pollable: Writable) -> None:
        """Call back also when `pollable` can be written, for as long as it has bytes left to send."""
        number, wants_write = pollable.fileno(), pollable.wants_write
        if number >= 0 and wants_write is not (number in self._writing):
            self._poll.modify(number, select.EPOLLIN | (select.EPOLLOUT if wants_write else 0))
            (self._writing.add if wants_write else self._writing.discard)(number)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run `callback` at the next `poll`, before it waits."""
        self._soon.append(callback)

    def poll(self, seconds: float) -> None:
        """Wait at most `seconds` and run the callbacks of all descriptors that are ready."""
        while self._soon:
            self._soon.popleft()()
        for number, _ in self._poll.poll(max(0.0, seconds)):
            callback = self._callbacks.get(number)
            if callback is not None:  # else an earlier callback has unregistered it
                callback()

    def close(self) -> None:
        """Close the epoll descriptor."""
        self._poll.close()
