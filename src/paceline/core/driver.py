"""Drives a server in a simulation that writes no run folder and no log."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Input, Reply
from paceline.core.server import Server


class BareDriver:
    """Feeds inputs to the server; sends each worker its weights, then its reply."""

    def __init__(self, server: Server, send: Callable[[Reply], None]) -> None:
        self.server, self.send = server, send
        self.memories: dict[int, WorkerBuffers] = {}

    def handle(self, message: Input) -> None:
        self.answer(self.server.handle(message).replies)

    def answer(self, replies: tuple[Reply, ...]) -> None:
        """Send the replies of one input."""
        for reply in replies:
            self.server.send_weights(reply, self.memories[reply.worker])
            self.send(reply)
