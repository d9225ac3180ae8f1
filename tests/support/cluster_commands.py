"""Runs `paceline server` and `paceline worker` as processes of one loopback cluster."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from tests.support.commands import Command
from tests.support.waiting import until

RUN = ("--dataset", "fashion-mnist-sample", "--threads", "1", "--name", "it", "--seed", "3", "--score", "none")


def serve(stack: ExitStack, cwd: Path, *arguments: str) -> Command:
    """Start a server."""
    return stack.enter_context(Command("server", *arguments, cwd=cwd))


def address_of(folder: Path) -> str:
    """The address that the server of a run listens on, once it is written."""
    until((folder / "server.json").exists, f"a server in {folder}")
    return str(json.loads((folder / "server.json").read_text())["address"])


def workers(stack: ExitStack, cwd: Path, count: int, *arguments: str) -> list[Command]:
    """Start workers that connect to the server of `runs/it`."""
    words = ("worker", "--connect", address_of(cwd / "runs/it"), "--threads", "1", *arguments)
    if "--token-file" not in arguments:
        words += ("--token-file", "runs/it/token")
    return [stack.enter_context(Command(*words, cwd=cwd)) for _ in range(count)]
