"""The code of a script on several machines: its file and the modules of its folder, compared by their hashes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.runs.recording import ScriptCall
from paceline.runtimes.scripts.lines_to_add.modules import read_script, with_helpers


def hashes_of(script: Path) -> dict[str, str]:
    """The hashes of a script and of the modules in its folder that it imports, by their place in that folder."""
    _, *helpers = with_helpers(read_script(script))
    places = {os.path.relpath(file.path, script.resolve().parent): file.path for file in helpers}
    return {place: _sha256(places[place]) for place in sorted(places)} | {"": _sha256(script)}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


@dataclass(frozen=True)
class ServedScript:
    """What a server tells its workers about the script that they run."""

    command: list[str]
    folder: str  # where the server's user started it
    files: Mapping[str, str]
    typed: frozenset[str]

    @staticmethod
    def of(call: ScriptCall, typed: list[str]) -> ServedScript:
        """The script of a run that this machine serves; `typed` are the settings that the user gave."""
        return ServedScript(call.command, call.cwd, hashes_of(call.path), frozenset(typed))

    def to_fields(self) -> dict[str, Any]:
        """For the server's welcome."""
        where = {"command": self.command, "folder": self.folder}
        return {**where, "files": dict(self.files), "typed": sorted(self.typed)}

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> ServedScript:
        """From a server's welcome."""
        return ServedScript(fields["command"], fields["folder"], fields["files"], frozenset(fields["typed"]))

    def find(self, given: str | None) -> list[str]:
        """The script's command on this machine. Raise UserError if it is not here, or is other code."""
        name, *arguments = self.command
        places = [Path(given)] if given is not None else [Path(name), Path(self.folder, name)]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            looked = " and ".join(dict.fromkeys(str(place.absolute()) for place in places))
            raise UserError(
                f"the run's script {name} is not here (looked for {looked}): copy it, or give --script FILE"
            )
        here = hashes_of(path)
        other = [file for file in {**self.files, **here} if self.files.get(file) != here.get(file)]
        if other:
            what = str(path) if not other[0] else str(path.parent / other[0])
            more = f" and {len(other) - 1} more" if len(other) > 1 else ""
            raise UserError(f"{what}{more} differs from the file on the server's machine: copy the same code here")
        return [str(path), *arguments]
