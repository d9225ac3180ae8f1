"""Every command of `docs/tutorial.md` works, in the order of the page, and prints the lines that the page shows.

Blocks are told by their fence: `sh` is run (with a title, where the title says), `text` is what was printed, `python`
is a file. Numbers may differ, dots stand for anything. The two machines are two folders here.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import GIVING_WAY, PATIENCE
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
CHANCE = re.compile(r"(?<=worst first: ).*|(?<=^training time: )[^;]*")
"""What is shown, and may be in other words in another run: the order of the classes, and the unit of a time."""
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def pattern(line: str) -> re.Pattern[str]:
    """What a line of output must look like: the same words, any numbers, any spaces.

    >>> bool(pattern("188 updates, 69.95 %").search("1,250 updates,  7 %"))
    True
    """
    line = CHANCE.sub("...", line.strip())
    words = re.split(r"(\d[\d.,:/-]*\d|\d|\.\.\.|\s+)", line)
    parts = [r"\s+" if word.isspace() else ".+" if word == "..." else re.escape(word) for word in words]
    numbered = [r"[\d.,:/-]+" if word[:1].isdigit() else part for word, part in zip(words, parts, strict=True)]
    return re.compile(r"(?m)^\s*" + "".join(numbered) + r"\s*$")


class Reader:
    """Someone who does what the page says, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.here, self.there = folder / "first", folder / "second"
        self.here.mkdir()
        self.there.mkdir()
        self.log = folder / "output"
        self.log.touch()
        self.read, self.last = 0, ""
        self.running: list[subprocess.Popen[bytes]] = []
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        told = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        self.environment = {**told, **GIVING_WAY, "PATH": path, "PYTHONUNBUFFERED": "1"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def start(self, text: str, folder: Path) -> subprocess.Popen[bytes]:
        """Run a block as it stands on the page, but for the address and the token of a server."""
        self.last = text
        text = text.replace("10.0.0.1", "127.0.0.1").replace(":29500", f":{self.port}")
        if "PACELINE_TOKEN=..." in text:
            token = (self.here / "runs/two/token").read_text().strip()
            text = text.replace("PACELINE_TOKEN=...", f"PACELINE_TOKEN={token}")
        with self.log.open("ab") as log:
            words = ["sh", "-e", "-c", text]
            process = subprocess.Popen(
                words, cwd=folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self.running.append(process)
        return process

    def run(self, text: str, *folders: Path) -> None:
        """Run a block to its end, in all folders at the same time."""
        for process in [self.start(text, folder) for folder in folders]:
            assert process.wait(PATIENCE) == 0, f"{text}\n{self.log.read_text()[self.read :]}"

    def expect(self, text: str) -> None:
        """Wait until every line of `text` was printed since the last command."""

        def missing() -> list[str]:
            printed = self.log.read_text()[self.read :]
            return [line for line in text.splitlines() if not pattern(line).search(printed)]

        def have_ended() -> bool:
            return all(process.poll() is not None for process in self.running)

        until(lambda: not missing() or have_ended(), lambda: f"{missing()}\nbut: {self.log.read_text()[self.read :]}")
        assert not missing(), f"never printed: {missing()}\nbut: {self.log.read_text()[self.read :]}"

    def expect_all(self, text: str) -> None:
        """The last command printed these lines and no others."""
        assert self.log.read_text()[self.read :].splitlines() == text.splitlines()

    def close(self) -> None:
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()


def follow(reader: Reader, kind: str, title: str, text: str) -> None:
    """Do what one block says."""
    match kind, title:
        case "sh", "install":
            targets = re.findall(r"^make (\w+)", text, re.MULTILINE)
            assert targets == ["setup"]
            subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, check=True, capture_output=True)
        case "sh", "on the first machine":
            reader.read = reader.log.stat().st_size
            reader.start(text, reader.here)
        case "sh", "on both machines":
            shutil.copy(reader.here / "my_model.py", reader.there)
            reader.run(text, reader.here, reader.there)
        case "sh", "":
            reader.read = reader.log.stat().st_size
            reader.run(text, reader.here)
        case "python", file:
            (reader.here / file).write_text(text)
        case "text", _:
            reader.expect(text)
            if reader.last.startswith("ls "):
                reader.expect_all(text)
        case _:
            pytest.fail(f"a block of kind {kind} with title '{title}': what is to be done with it?")


@pytest.mark.timeout(300)
def test_a_stranger_can_follow_the_tutorial(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    try:
        for kind, title, text in BLOCK.findall(PAGE):
            follow(reader, kind, title, text)
        assert all(process.wait(PATIENCE) == 0 for process in reader.running)
    finally:
        reader.close()
    assert {path.name for path in (reader.here / "runs").iterdir()} >= {"first", "second", "mine", "loop", "two"}


def test_no_block_of_the_page_is_overlooked() -> None:
    assert len(BLOCK.findall(PAGE)) == PAGE.count("\n```") / 2
    assert not re.search(r"^paceline ", BLOCK.sub("", PAGE), re.MULTILINE)


def test_all_figures_of_one_run_are_of_one_session() -> None:
    """The closing lines of a run, the table of `compare` and the list of all runs show the same figures of it."""
    shown = [text for kind, _, text in BLOCK.findall(PAGE) if kind == "text"]
    (compared,) = [text for text in shown if text.startswith("run     strategy")]
    (listed,) = [text for text in shown if text.startswith("run         strategy")]
    assert {line.split()[0] for line in listed.splitlines()[1:-1]} == set(re.findall(r"--name (\w[\w-]*)", PAGE)) | {
        "mine"
    }
    ended = [text for text in shown if "run folder: runs/" in text]
    assert len(ended) == 2
    for text in ended:
        (name,) = re.findall(r"run folder: runs/(\w+)", text)
        accuracies = re.findall(r"test accuracy:? +([\d.]+) %", text)
        assert len(accuracies) == 2 and set(accuracies) <= set(row_of(name, listed))
        if name in compared:
            speed = re.findall(r"([\d,]+) samples/s", text)
            assert {*accuracies, *speed} <= set(row_of(name, compared))
    (shares,) = [text for text in shown if text.startswith("worker  state")]
    (computing,) = re.findall(r"workers: (\d+) % computing", ended[0])
    assert min(share := [int(row) for row in re.findall(r"done +(\d+) %", shares)]) <= int(computing) <= max(share)


def row_of(name: str, table: str) -> list[str]:
    (row,) = [line.split() for line in table.splitlines() if line.split()[0] == name]
    return row
