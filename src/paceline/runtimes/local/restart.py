"""Keeps a server going: it lives in a process of its own, and when that is killed, in another, from where it was."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from paceline.errors import PacelineError, Reported, ServerLost
from paceline.system.process import describe_end, die_with
from paceline.system.signals import handle_signals, raise_on_signals


def keep_going(
    live: Callable[[bool], object], restarts: int, lost: Callable[[str], ServerLost | None]
) -> Iterator[str]:
    """`live(False)` in a child, then `live(True)` in another each time one is killed or has lost a part; yields how.

    `lost` makes the error for a server that is gone; None where there is nothing yet to go on from.
    """
    for restart in range(restarts + 1):
        status, said = _in_a_child(lambda: live(restart > 0))  # noqa: B023  # it is over before the next one
        if status == 0:
            return
        complaint: dict[str, Any] = (
            json.loads(said) if said else {"lost": f"the server process ended ({describe_end(status)})"}
        )
        if complaint["lost"] is None:
            raise Reported(complaint["text"], complaint["code"])
        error = lost(complaint["lost"])
        if error is None:
            raise Reported(f"{complaint['lost']} before training began", 1)
        if restart == restarts:
            raise error
        yield error.what


def _in_a_child(do: Callable[[], object]) -> tuple[int, bytes]:
    """Its wait status, and what it said if it failed in a way that we know."""
    reader, writer = os.pipe()
    parent = os.getpid()
    with _passing_on_signals() as children:
        child = os.fork()
        if child == 0:
            os.close(reader)
            _be(do, writer, parent)
        children.append(child)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
    return status, said


def _be(do: Callable[[], object], writer: int, parent: int) -> None:
    """In the child, which never returns."""
    code = 1
    try:
        die_with(parent)
        os.setpgid(0, 0)  # a Ctrl-C comes once, from our parent
        with raise_on_signals():
            do()
        code = 0
    except PacelineError as error:
        code = error.exit_code
        what = error.what if isinstance(error, ServerLost) else None  # then another can go on
        os.write(writer, json.dumps({"code": code, "text": str(error), "lost": what}).encode())
    except KeyboardInterrupt:
        code = 130
        os.write(writer, json.dumps({"code": code, "text": "interrupted", "lost": None}).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@contextlib.contextmanager
def _passing_on_signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM are for the child."""
    children: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    with handle_signals(pass_on):
        yield children
