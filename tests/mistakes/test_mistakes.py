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
from pathlib import Path

import pytest

from paceline.cli.main import main

HERE = Path(__file__).parent
FILE = HERE / "mistakes.txt"
PROGRAMS = HERE / "programs"
SECONDS = 120
HARMLESS = ("one-ends", "one-breaks", "no-finish", "no-loader")
"""Loops that end the run well; that one worker left before the others, or that all train on all data, is said."""
SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "COLUMNS": "1000", "CUDA_VISIBLE_DEVICES": ""}
PROGRESS = re.compile(r" *(\d+ %  )?update \d+  ")
Mistake = tuple[str, str]  # a command and the answer to it


def read_mistakes() -> list[Mistake]:
    """Return the commands of the file and their answers, which end at an empty line."""
    blocks = [block.strip("\n").partition("\n") for block in FILE.read_text(encoding="utf-8").split("\n\n")]
    return [(command[2:], answer) for command, _, answer in blocks if command.startswith("$ ")]


MISTAKES = read_mistakes()


def is_quick(mistake: Mistake) -> bool:
    """Whether the command is refused before a process starts, so that it can be given in this one."""
    command, answer = mistake
    return (
        command.startswith("paceline ") and answer.endswith("exit code 2") and not re.search(r"\.py\b|server", command)
    )


QUICK = [mistake for mistake in MISTAKES if is_quick(mistake)]
REAL = [mistake for mistake in MISTAKES if not is_quick(mistake)]


def environment(folder: Path) -> dict[str, str]:
    """Return the settings that make answers the same on every machine: no data set is found, no GPU, no folded line."""
    empty = str(folder / "empty")
    return {**SETTINGS, "XDG_CACHE_HOME": empty, "PACELINE_SYSTEM_DATA": empty, "XDG_CONFIG_HOME": empty}


def answer_to(command: str, folder: Path) -> str:
    """Run a command in a folder that holds the programs. Return its standard error, exit code and run folders."""
    shutil.copytree(PROGRAMS, folder, dirs_exist_ok=True)
    program, *arguments = shlex.split(command)
    words = [sys.executable, *(["-P", "-m", "paceline"] if program == "paceline" else []), *arguments]
    variables = {**os.environ, **environment(folder)}
    done = subprocess.run(
        words, cwd=folder, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    return _answer(done.stderr, done.returncode, folder)


def _answer(said: str, code: int, folder: Path) -> str:
    lines = [_without_chance(line, folder) for line in said.splitlines() if line.strip() and not PROGRESS.match(line)]
    left = sorted(path.name for path in (folder / "runs").glob("*"))
    return "\n".join([*lines, f"exit code {code}", *(f"left: runs/{_without_chance(name, folder)}" for name in left)])


def _without_chance(line: str, folder: Path) -> str:
    """Return a line without what differs from run to run and from machine to machine."""
    line = line.replace(f"{folder.resolve()}/", "").replace(f"{folder}/", "").rstrip()
    line = re.sub(r'File ".*/site-packages/', 'File ".../', line)
    line = re.sub(r"\d{8}-\d{6}", "DATE", line)
    line = re.sub(r"(shown once: )\S+", r"\1TOKEN", line)
    line = re.sub(r"sha256:[0-9a-f]{64}", "sha256:DIGEST", line)
    line = re.sub(r"\b(process|update) \d+\b", r"\1 N", line)
    chance = ("other worker", "before session.prepare", "suspicious", "NaN or infinity", "NaN or an infinity")
    if any(words in line for words in chance):  # whichever was first
        line = re.sub(r"\bworker \d+", "worker N", line)
    if "collapsed" in line or "suspicious" in line:  # rounding differs between processors, and an explosion shows it
        line = re.sub(r"\d+\.\d+(e\+\d+)?", "X", line)
    return line


def name_of(value: str) -> str:
    return value.partition("\n")[0].removeprefix("paceline ")[:60]


@pytest.mark.parametrize(("command", "answer"), QUICK, ids=name_of)
def test_a_mistake_gets_its_answer_at_once(
    command: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(PROGRAMS, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    code = main(shlex.split(command)[1:])
    assert _answer(capsys.readouterr().err, code, tmp_path) == answer


@pytest.mark.real
@pytest.mark.parametrize(("command", "answer"), REAL, ids=name_of)
def test_a_mistake_of_a_started_run_gets_its_answer(command: str, answer: str, tmp_path: Path) -> None:
    assert answer_to(command, tmp_path) == answer


def test_no_answer_is_a_traceback_of_paceline_and_none_pretends_success() -> None:
    for command, answer in MISTAKES:
        assert "/paceline/" not in answer, command
        assert "exit code 0" not in answer or command.endswith(HARMLESS), command


def test_every_program_is_a_mistake_of_the_file() -> None:
    named = {word for command, _ in MISTAKES for word in re.split(r"[\s:]", command)}
    assert {path.name for path in PROGRAMS.iterdir() if path.suffix in (".py", ".toml")} <= named


def _write() -> None:
    blocks = []
    for block in FILE.read_text(encoding="utf-8").split("\n\n"):
        command = block.strip("\n").partition("\n")[0]
        if command.startswith("$ "):
            with tempfile.TemporaryDirectory() as folder:
                blocks.append(f"{command}\n{answer_to(command[2:], Path(folder))}")
        else:
            blocks.append(block.strip("\n"))
    FILE.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _write()
