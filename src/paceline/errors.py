"""Every error Paceline raises on purpose.

    PacelineError            anything below; the command line prints it as one line, without a traceback
    ├── UserError            what was asked cannot be done: exit code 2
    │   └── DataError        a data file is missing, truncated or corrupted
    ├── Diverged             training produced numbers that are not finite: exit code 3
    ├── RunFailed            a process of ours died or the machine ran out of something: exit code 1
    │   └── ServerLost       the process that keeps the run was killed; what it had acknowledged is in its folder
    ├── Reported             what a process of ours said last, with the exit code that it asked for
    ├── Forgotten            a server that was started anew does not know this worker, which may join again
    ├── Interrupted          Ctrl-C or SIGTERM among many runs, with what was kept: exit code 130
    └── ProtocolError        the other side of a transport sent what it must not: its fault, never ours

A message says what was asked, what was found and what to do. A lost worker is an event, not an exception.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

MAX_NAMED = 30  # names that are all listed beside the nearest; of more, the nearest are enough


class PacelineError(Exception):
    """The root of the tree; `exit_code` is what the command line ends with."""

    exit_code = 1


class UserError(PacelineError):
    """The request itself is wrong; nothing was started, or nothing was lost."""

    exit_code = 2


class DataError(UserError):
    """A data set is not there, or is not what it says it is."""


class Diverged(PacelineError):
    """A push or the weights hold a NaN or an infinity."""

    exit_code = 3


class RunFailed(PacelineError):
    """The run could not go on, through no fault of its settings."""


class ServerLost(RunFailed):
    """The process that kept the run is gone; `what` says how, and the run can be resumed."""

    def __init__(self, what: str, resume_hint: str) -> None:
        super().__init__(f"{what}: nothing acknowledged is lost, {resume_hint}")
        self.what = what


class ChildFailed(PacelineError):
    """A process of ours could not go on, and said why."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class UnknownWorker(PacelineError):
    """The server took us for somebody new; `welcome` is what it told the newcomer."""

    def __init__(self, welcome: dict[str, object]) -> None:
        super().__init__("the server does not know this worker any more")
        self.welcome = welcome


class Interrupted(PacelineError):
    """Somebody stopped it; what had ended is kept."""

    exit_code = 130


class ProtocolError(PacelineError):
    """A peer broke the protocol; the connection is closed, the run goes on."""


def unknown_name(kind: str, asked: str, known: Iterable[str]) -> UserError:
    """The error for a name nobody knows, with the nearest known names offered.

    >>> print(unknown_name("model", "lenet", ["lenet5", "cnn"]))
    unknown model 'lenet': did you mean 'lenet5'? Known: cnn, lenet5
    """
    names = sorted(known)
    near = difflib.get_close_matches(asked, names, n=3, cutoff=0.5)
    offer = "did you mean " + " or ".join(f"'{name}'" for name in near) + "?" if near else ""
    known_ones = f"Known: {', '.join(names)}" if not near or len(names) <= MAX_NAMED else ""
    return UserError(f"unknown {kind} '{asked}': {' '.join(filter(None, (offer, known_ones)))}")


def mismatched_keys(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """The names of what `theirs` lacks or has otherwise.

    >>> mismatched_keys({"layout": 1, "targets": 2}, {"layout": 1, "targets": 3})
    ['targets']
    """
    return [name for name, value in ours.items() if theirs.get(name) != value]
