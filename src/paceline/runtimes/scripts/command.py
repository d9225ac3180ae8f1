"""The script and its arguments as they were typed: a flag of Paceline among these is refused before anything starts."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import UserError
from paceline.settings.features import SCRIPT_DECIDES, SCRIPT_MAY_DECIDE

END = "--"  # right behind the script: all that follows is the script's, whatever Paceline's flags are called
OF_SCRIPTS = frozenset(
    f"--{name.replace('_', '-')}"
    for name in (
        *(name for name in (*SCRIPT_DECIDES, *SCRIPT_MAY_DECIDE) if name != "workers"),
        *("help", "help-all", "json", "name", "runs", "seed", "steps", "threads", "max-seconds", "target", "delay"),
        *("no-nesterov", "schedule", "warmup", "scale-lr", "split", "shard", "weights", "path", "rule", "average"),
        *("keep", "track", "resume", "wait", "key", "trust", "plain"),
    )
)
"""Flags of Paceline that many scripts have as well: they are not asked about behind a script."""
ALIKE = 0.85  # from which likeness on a word is taken for a mistyped flag


def command_of(words: list[str], flags: Iterable[str]) -> list[str]:
    """Return the script and its arguments. Raise UserError if one is a flag of Paceline, and not of the script itself.

    >>> command_of(["train.py", "--lr", "0.1", "-v"], ["--lr", "--strategy"])
    ['train.py', '--lr', '0.1', '-v']
    >>> command_of(["train.py", "--", "--strategy", "fast"], ["--lr", "--strategy"])
    ['train.py', '--strategy', 'fast']
    """
    if END in words[1:2]:
        return [words[0], *words[2:]]
    own: set[str] | None = None
    for word in words[1:]:
        flag = "-n" if re.fullmatch(r"-n\d+", word) else word.partition("=")[0]
        meant = _meant(flag, flags)
        if meant is None:
            continue
        own = own_flags(Path(words[0])) if own is None else own
        if flag.lstrip("-").replace("-", "_") not in own:
            script = Path(words[0]).name
            what = f"{flag} is a flag of Paceline" if meant == flag else f"{flag} looks like Paceline's flag {meant}"
            instead = f"put it before {script}; if it is the script's own, write '{script} {END} {flag} ...'"
            raise UserError(f"{what}, and behind {script} it would go to the script: {instead}")
    return words


def _meant(flag: str, flags: Iterable[str]) -> str | None:
    """The flag of Paceline that a word behind the script is, or is nearly; None if scripts may well have it."""
    known = [one for one in flags if one != "-h" and one not in OF_SCRIPTS]
    if not flag.startswith("-") or flag in OF_SCRIPTS:
        return None
    near = [flag] if flag in known else []
    if flag.startswith("--"):
        near += difflib.get_close_matches(flag, [one for one in known if one.startswith("--")], n=1, cutoff=ALIKE)
    return near[0] if near else None


def own_flags(script: Path) -> set[str]:
    """The names of flags that a script seems to take: its texts that are flags, and what its functions and classes
    declare, of which libraries (click, simple-parsing) make flags.
    """
    try:
        nodes = list(ast.walk(ast.parse(script.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return set()
    found = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {text.lstrip("-").replace("-", "_") for text in found if text.startswith("-")}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    fields = [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    return names | {target.id for target in fields if isinstance(target, ast.Name)}
