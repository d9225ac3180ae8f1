"""Every error that Paceline raises on purpose.

    PacelineError            the root; the command line prints it as one line, without a traceback
    ├── UserError            the request cannot be met: exit code 2
    │   ├── DataError        a data file is missing, truncated or corrupted
    │   └── DiskError        the run's disk is full, read-only or broken; the run can be resumed
    ├── Diverged             training produced a NaN or an infinity: exit code 3
    ├── RunFailed            a process died, or the machine ran out of a resource: exit code 1
    │   └── ServerLost       the server process was killed; every acknowledged push is in the run folder
    ├── StoreFailed          an object store did not do what was asked; the run goes on without it
    ├── UnknownWorker        a restarted server does not know this worker, which may join again
    ├── Interrupted          Ctrl-C or SIGTERM during several runs: exit code 130
    └── ProtocolError        a peer sent a message that breaks the protocol

A message says what was asked, what was found and what to do. A lost worker is an event, not an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MAX_NAMED = 30  # up to this many known names are all listed beside the nearest ones
OTHER_NAMES = {
    "learning_rate": "lr",
    "batch": "batch_size",
    "bs": "batch_size",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "max_steps": "steps",
    "num_workers": "workers",
    "nproc": "workers",
    "nproc_per_node": "workers",
    "world_size": "workers",
    "wd": "weight_decay",
    "clip_grad_norm": "clip",
    "output_dir": "runs",
    "gpu": "cuda",
}
"""What other programs call our settings, and their values: such a name is offered first."""

SERVER_GONE = "the server of this run is gone"
"""What a worker says whose connection to the server has ended."""


class PacelineError(Exception):
    """The root of the tree; the command line ends with `exit_code`."""

    exit_code = 1


class UserError(PacelineError):
    """The request itself is wrong; nothing was started and nothing is lost."""

    exit_code = 2


class DataError(UserError):
    """A data set is missing, or its content is not what its name promises."""


class DiskError(UserError):
    """The run folder cannot be written; once its disk is mended, the run can be resumed."""


class Diverged(PacelineError):
    """A push or the weights hold a NaN or an infinity."""

    exit_code = 3


class RunFailed(PacelineError):
    """The run cannot go on, although its settings are right."""


class ServerLost(RunFailed):
    """The server process is gone; `what` says how, and the run can be resumed."""

    def __init__(self, what: str, resume_hint: str, keeps: str = "nothing acknowledged is lost") -> None:
        super().__init__(f"{what}: {keeps}, {resume_hint}")
        self.what = what


class StoreFailed(PacelineError):
    """An object store is unreachable, refuses, or does not hold what was asked for."""


class UnknownWorker(PacelineError):
    """The server treats this worker as a new one; `welcome` is the handshake that it sent to the new worker."""

    def __init__(self, welcome: dict[str, object]) -> None:
        super().__init__("the server does not know this worker any more")
        self.welcome = welcome


class Interrupted(PacelineError):
    """A signal stopped a group of runs; the results of finished runs are kept."""

    exit_code = 130


class ProtocolError(PacelineError):
    """A peer broke the protocol; the connection is closed, the run goes on."""


def error_of_child(text: str, exit_code: int) -> PacelineError:
    """The error that a child process ended with, by its message and its exit code: raise it again in the parent.

    >>> error_of_child("--lr must be positive", 2)
    UserError('--lr must be positive')
    """
    kinds: tuple[type[PacelineError], ...] = (UserError, Diverged, Interrupted)
    return next((kind for kind in kinds if kind.exit_code == exit_code), RunFailed)(text)


def unknown_name(kind: str, asked: str, known: Iterable[str]) -> UserError:
    """The error for an unknown name, which offers the nearest known names.

    >>> print(unknown_name("model", "lenet", ["lenet5", "cnn"]))
    unknown model 'lenet': did you mean 'lenet5'? Known: cnn, lenet5
    """
    names = sorted(known)
    near = nearest_names(asked, names)
    if not near:
        return UserError(f"unknown {kind} '{asked}', known are: {', '.join(names)}")
    offer = "did you mean " + " or ".join(f"'{name}'" for name in near) + "?"
    return UserError(f"unknown {kind} '{asked}': {offer}{_all_of(names)}")


def _all_of(names: list[str]) -> str:
    return f" Known: {', '.join(names)}" if len(names) <= MAX_NAMED else ""


KINDS_IN_WORDS = {
    "bool": "true or false",
    "int": "a whole number without quotes, as in 2",
    "float": "a number without quotes, as in 0.5",
    "str": 'text in quotes, as in "text"',
    "list[str]": 'a list of texts, as in ["text"]',
    "list[float]": "a list of numbers, as in [0.9, 0.999]",
}
"""What to write as the value of a setting, by its type."""


def wrong_type(name: str, value: object, kind: str) -> UserError:
    """The error for the value of a setting that is of another type.

    >>> print(wrong_type("workers", "2", "int"))
    workers = "2": write a whole number without quotes, as in 2
    """
    shown = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else repr(value)
    wanted = KINDS_IN_WORDS[kind] if isinstance(value, str) else KINDS_IN_WORDS[kind].replace(" without quotes", "")
    return UserError(f"{name} = {shown}: write {wanted}")


def nearest_names(asked: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names that an unknown one may stand for: what other programs call it, else names spelled alike.

    >>> nearest_names("learning_rate", ["aggregate", "lr"]), nearest_names("--momentun", ["--momentum", "--lr"])
    (['lr'], ['--momentum'])
    """
    import difflib  # the overview of the command line does without it

    names = list(known)
    dashes = "--" if asked.startswith("--") else ""
    meant = OTHER_NAMES.get(asked.removeprefix("--").replace("-", "_"), "")
    meant = dashes + (meant.replace("_", "-") if dashes else meant)
    if meant in names:
        return [meant]
    words = [name.removeprefix(dashes) for name in names]  # dashes are alike in all
    return [dashes + word for word in difflib.get_close_matches(asked.removeprefix(dashes), words, most, 0.6)]


def mismatched_keys(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """The keys of `ours` that `theirs` lacks or holds with another value.

    >>> mismatched_keys({"layout": 1, "targets": 2}, {"layout": 1, "targets": 3})
    ['targets']
    """
    return [name for name, value in ours.items() if theirs.get(name) != value]
