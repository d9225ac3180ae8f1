"""What people read: no line longer than their terminal, no control character where there is none."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.main import VERBS, main
from paceline.data.datasets import SAMPLE
from paceline.reports import console as console_module
from paceline.reports.console import Console
from paceline.system.terminal import can_redraw, fold_for, fold_help, printable, terminal_width

TABLES = [["reproduce", "distml"], ["reproduce", "mxnet"]]
ALL_HELP = [[], *([verb] for verb in VERBS), *TABLES]


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("words", ALL_HELP, ids=" ".join)
def test_help_fits_and_is_plain(
    words: list[str], flag: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    try:
        code = main([*words, flag])
    except SystemExit as end:
        code = int(end.code or 0)
    out, error = capsys.readouterr()
    assert code == 0 and not error and out.startswith("usage: paceline")
    assert max(map(len, out.splitlines())) <= width
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\x9b]", out)


def test_folded_help_says_the_same_and_its_commands_can_be_copied(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for width in (200, 40):
        monkeypatch.setenv("COLUMNS", str(width))
        with pytest.raises(SystemExit):
            main(["simulate", "--help-all"])
        texts.append(capsys.readouterr().out.replace(" \\\n", " "))
    wide, narrow = (" ".join(text.split()) for text in texts)
    assert narrow == wide


WORDS = st.lists(st.text("abcdef-", min_size=1, max_size=12), min_size=1, max_size=12).map(" ".join)


@given(st.lists(st.tuples(st.sampled_from(["", "  ", "  paceline "]), WORDS, WORDS), max_size=5), st.integers(30, 60))
def test_any_help_fits_and_loses_no_word(lines: list[tuple[str, str, str]], width: int) -> None:
    text = "\n".join(f"{indent}{head}   {remark}" for indent, head, remark in lines)
    folded = fold_help(text, width)
    assert all(len(line) <= width for line in folded.split("\n"))
    assert folded.replace(" \\\n", " ").split() == text.split()


def test_lines_are_folded_for_a_terminal_or_for_columns_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a sentence of so many words that it cannot stand on one line, neither here nor on most terminals there are"
    monkeypatch.delenv("COLUMNS", raising=False)
    assert fold_for(io.StringIO(), [text]) == text
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert all(len(line) <= 80 for line in fold_for(terminal, [text]).split("\n"))
    monkeypatch.setenv("COLUMNS", "30")
    for stream in (terminal, io.StringIO()):
        assert all(len(line) <= 30 for line in fold_for(stream, [text]).split("\n"))


def test_the_closing_lines_and_doctor_fit_in_the_columns_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(tmp_path)  # whose name is long
    flags = ["--strategy", "classic", "--epochs", "0.02", "--train-score", "100"]
    assert main(["train", "--dataset", SAMPLE, *flags, "--name", "r"]) == 0
    closing = capsys.readouterr().out
    assert "Test accuracy by class" in closing and max(map(len, closing.splitlines())) <= 60
    main(["doctor"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_only_a_terminal_that_is_not_dumb_can_be_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert not can_redraw(terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert can_redraw(terminal) and not can_redraw(io.StringIO())


def all_from(terminal: int) -> str:
    """What was written to the other side, until nobody holds that any more."""
    written = b""
    while True:
        try:
            written += os.read(terminal, 1 << 16)
        except OSError:
            os.close(terminal)
            return written.decode()


def progress(fraction: float) -> dict[str, Any]:
    row = {"updates": 1 + int(1000 * fraction), "loss": 2.30264, "rate": 12345.6, "staleness": 12.34}
    return {"kind": "progress", "fraction": fraction, **row}


def test_a_file_gets_plain_lines_and_a_day_is_a_hundred_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now, file, day = [0.0], io.StringIO(), 86_400
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    with Console(file) as console:
        for second in range(day):
            now[0] = float(second)
            console.report(progress(second / day))
        console.report({"kind": "note", "text": "worker 1 is gone"})
    lines = file.getvalue().splitlines()
    assert 20 < len(lines) < 200
    assert lines[-1] == "worker 1 is gone"
    assert lines[0] == "  0 %  update 1  loss 2.3026  12,346/s  stale 12.3"
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", file.getvalue())


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_bar_of_forty_columns_stays_on_one_line(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    with os.fdopen(theirs, "w") as stream:
        assert terminal_width(stream) == 40
        monkeypatch.setenv("COLUMNS", "40")  # rich asks the standard streams alone
        with Console(stream) as console:
            for percent in range(0, 101, 25):
                console.report(progress(percent / 100))
            console.report({"kind": "note", "text": "a line that stays, and is longer than forty columns"})
    written = all_from(ours)
    if term == "dumb":
        assert "\x1b" not in written and "  0 %  update 1  loss" in written
        return
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    assert all(len(line) <= 40 for line in re.split(r"[\r\n]+", shown))
    assert " 50% loss 2.3026  12,346/s  stale 12.3" in shown and "a line that stays" in shown
    assert not re.search(r"\x1b\[[0-9;]*m", written.replace("\x1b[0m", ""))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["reproduce", "optlm"], "unknown table 'optlm': did you mean 'optml'? Known: dana, distml, mxnet, optml"),
        (["data", "lst"], "unknown action 'lst': did you mean 'list'?"),
        (
            ["resume"],
            "RUN is missing (a run folder, as in runs/NAME, or the URL of a copy, as in s3://BUCKET/runs/NAME)",
        ),
        (["worker"], "either of two is needed: --run RUN for a server on this machine, "),
        (["worker", "--conect", "a:1"], "unknown flag '--conect': did you mean --connect"),
        (["train", "--lr"], "argument --lr needs a value: there is none behind it; see 'paceline train --help'"),
        (["bench"], "benchmark is missing (scaling)"),
        (["trian"], "unknown verb 'trian': did you mean 'train'"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


@pytest.mark.real
def test_a_run_on_a_terminal_of_forty_columns(tmp_path: Path) -> None:
    """From the first note to the closing lines, nothing is wider than the terminal, and it is left as it was found."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    words = ["simulate", "--timing-only", "--steps", "3000", "--runs", str(tmp_path), "--name", "r"]
    run = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words], stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm"}
    )
    os.close(theirs)
    written = all_from(ours)
    assert run.wait() == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    wide = [line for line in re.split(r"[\r\n]+", shown) if len(line) > 40 and str(tmp_path) not in line]
    assert not wide and "finished: " in shown
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h")


@given(st.text(max_size=80), st.integers(2, 60))
def test_a_peer_chooses_what_is_said_never_what_the_terminal_does(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert shown.isprintable() and len(shown) <= limit
    assert shown == text or not text.isprintable() or len(text) > limit
    assert printable(shown, limit) == shown
    shown.encode()


@pytest.mark.parametrize(
    "evil", ["\x1b[2J", "\r", "\n", "\x07", "\x9b31m", "\u202e", "\u2066", "\u2028", "\ud800", "\x00", "\x7f"]
)
def test_characters_that_a_terminal_obeys_are_escaped(evil: str) -> None:
    assert evil[0] not in printable(f"worker {evil} joined")
    assert printable(f"worker {evil} joined").startswith("worker \\")
