"""Start processes again that were killed: a server in a child process, from its checkpoint and log, and workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from paceline.errors import PacelineError, RunFailed, ServerLost, error_of_child
from paceline.system.process import describe_end, die_with
from paceline.system.signals import INTERRUPT_SIGNALS, InterruptHandler, handle_signals
from paceline.system.strict_json import to_json


class WorkerRestarts:
    """Counts how often killed workers are started again (`--restart-workers`), also over restarts of the server."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0

    def grant(self, status: int) -> str | None:
        """Count a restart if a signal ended a process (its wait status) and one is left; return it as "1 of 2".

        A process that exited by itself would do the same again.

        >>> restarts = WorkerRestarts(1)
        >>> restarts.grant(1 << 8), restarts.grant(signal.SIGKILL), restarts.grant(signal.SIGKILL)
        (None, '1 of 1', None)
        """
        if not os.WIFSIGNALED(status) or self._used >= self._limit:
            return None
        self._used += 1
        return f"{self._used} of {self._limit}"


def keep_going(
    live: Callable[[bool], object], restarts: int, lost: Callable[[str], ServerLost | None]
) -> Iterator[str]:
    """Call `live(False)` in a child process, and `live(True)` in another one each time it is killed or loses a shard.

    Yield the reason of each restart. `lost` makes the error for a lost server, or None if there is nothing to resume.
    """
    for restart in range(restarts + 1):
        status, complaint = _in_a_child(partial(live, restart > 0))
        if status == 0:
            return
        if complaint["lost"] is None:
            raise error_of_child(complaint["text"], complaint["code"])
        error = lost(complaint["lost"])
        if error is None:
            raise RunFailed(f"{complaint['lost']} before training began")
        if restart == restarts:
            raise error
        yield error.what


def _in_a_child(do: Callable[[], object]) -> tuple[int, dict[str, Any]]:
    """Run `do` in a child process, which gets every Ctrl-C and SIGTERM. Return its wait status and its error."""
    reader, writer = os.pipe()
    parent = os.getpid()
    children: list[int] = []

    def forward(number: int, frame: object) -> None:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    with handle_signals(forward):
        child = os.fork()
        if child == 0:
            os.close(reader)
            _be(do, writer, parent)
        children.append(child)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
    return status, json.loads(said) if said else {"lost": f"the server process ended ({describe_end(status)})"}


def _be(do: Callable[[], object], writer: int, parent: int) -> None:
    """In the child: run `do` and exit."""
    code = 1
    try:
        die_with(parent)
        os.setpgid(0, 0)  # a Ctrl-C then comes once, from the parent
        interrupt = InterruptHandler()
        for number in INTERRUPT_SIGNALS:
            signal.signal(number, interrupt)
        do()
        code = 0
    except PacelineError as error:
        code = error.exit_code
        what = error.what if isinstance(error, ServerLost) else None  # another process can resume
        os.write(writer, to_json({"code": code, "text": str(error), "lost": what}).encode())
    except KeyboardInterrupt:
        code = 130
        os.write(writer, to_json({"code": code, "text": "interrupted", "lost": None}).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
