"""Every mistake of mistakes.txt gets the answer that stands there, so that a changed message changes that file.

`python -m tests.mistakes.test_mistakes` writes the answers of today into it; read the difference before you commit it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILE = HERE / "mistakes.txt"
PROGRAMS = HERE / "programs"
SECONDS = 120
Mistake = tuple[str, str]  # a command and the answer to it


def read_mistakes() -> Iterator[Mistake]:
    """Yield the commands of the file and their answers, which end at an empty line."""
    for block in FILE.read_text(encoding="utf-8").split("\n\n"):
        command, _, answer = block.strip("\n").partition("\n")
        if command.startswith("$ "):
            yield command[2:], answer


def answer_to(command: str, folder: Path) -> str:
    """Run a command in a folder that holds the programs. Return the end of its standard error and its exit code."""
    shutil.copytree(PROGRAMS, folder, dirs_exist_ok=True)
    program, *arguments = shlex.split(command)
    words = [sys.executable, *(["-P", "-m", "paceline"] if program == "paceline" else []), *arguments]
    nowhere = str(folder / "empty")
    settings = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": ""}
    places = {"XDG_CACHE_HOME": nowhere, "PACELINE_SYSTEM_DATA": nowhere, "XDG_CONFIG_HOME": str(folder / "config")}
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **settings, **places},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    lines = [*_said(done.stderr, folder), f"exit code {done.returncode}"]
    left = sorted(path.name for path in (folder / "runs").glob("*")) if (folder / "runs").is_dir() else []
    return "\n".join([*lines, *(f"left: runs/{_without_numbers(name)}" for name in left)])


def _said(text: str, folder: Path) -> list[str]:
    """The lines of a user's traceback and of our messages, without what differs from run to run."""
    return [
        _without_numbers(line.replace(f"{folder.resolve()}/", "").replace(f"{folder}/", "")).rstrip()
        for line in text.splitlines()
        if line.strip()
    ]


def _without_numbers(line: str) -> str:
    line = re.sub(r"\d{8}-\d{6}", "DATE", line)
    return re.sub(r"process \d+", "process N", line)


@pytest.mark.real
@pytest.mark.parametrize(("command", "answer"), list(read_mistakes()), ids=lambda text: text.partition("\n")[0][:60])
def test_a_mistake_gets_its_answer(command: str, answer: str, tmp_path: Path) -> None:
    assert answer_to(command, tmp_path) == answer


def test_no_answer_is_a_traceback_of_paceline_and_none_pretends_success() -> None:
    for command, answer in read_mistakes():
        assert "site-packages/paceline" not in answer and "src/paceline" not in answer, command
        assert not answer.endswith("exit code 0"), command


def test_every_program_is_a_mistake_of_the_file() -> None:
    commands = " ".join(command for command, _ in read_mistakes())
    assert {path.name for path in PROGRAMS.iterdir() if path.suffix in (".py", ".toml")} <= set(
        re.split(r"[\s:]", commands)
    )


def _write() -> None:
    texts = []
    for block in FILE.read_text(encoding="utf-8").split("\n\n"):
        command = block.strip("\n").partition("\n")[0]
        if command.startswith("$ "):
            with tempfile.TemporaryDirectory() as place:
                texts.append(f"{command}\n{answer_to(command[2:], Path(place))}")
        else:
            texts.append(block.strip("\n"))
    FILE.write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _write()
