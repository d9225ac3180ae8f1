"""The session of a library's training loop, and the strategy that the program names."""

from __future__ import annotations

from paceline.errors import UserError
from paceline.runtimes.scripts import session
from paceline.settings.strategies import strategy_of


def in_run() -> bool:
    """Whether `paceline run` started this process; if not, the program runs as without Paceline."""
    return session.inherited is not None


def join_run(strategy: str | None, caller: str) -> session.Session:
    """Join the run as `paceline.join()` does. Raise UserError if it has another strategy than the one named in code."""
    named = strategy_of(strategy).text if strategy is not None else None
    joined = session.join()
    joined.is_of_library = True
    if named is not None and in_run() and named != strategy_of(joined.config).text:
        what = f"{caller} names the strategy {named}, and the run's strategy is {joined.config.strategy}"
        raise UserError(f"{what}: start it with 'paceline run --strategy {named}', or leave the name out of the code")
    return joined


def missing(package: str, error: ImportError) -> UserError:
    """What to raise if a library is not installed; another ImportError of its own is raised as it is."""
    if error.name is None or error.name.split(".")[0] != package:
        raise error
    return UserError(f"this program needs the package {package}, which is not installed: pip install {package}")
