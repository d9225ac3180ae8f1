"""The live page in a real browser beside a real run: it draws, follows, and outlives the run and its own server."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, Browser
from tests.support.commands import Command, wait_for_records

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")

TRAIN = ("--dataset", "fashion-mnist-sample", "--strategy", "async", "--workers", "2", "--threads", "1", "--name", "it")
UPDATES = "Number([...document.querySelectorAll('dt')].find(e => e.textContent === 'updates')"
UPDATES += ".nextElementSibling.textContent.replace(/\\D/g, ''))"
BADGE, FEED = "document.querySelector('.badge').textContent", "document.querySelector('.feed').textContent"
CHARTS = "document.querySelectorAll('.plot svg').length"
ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as found:
        yield found


def watch(folder: Path, port: int = 0) -> tuple[Command, str, int]:
    """`paceline watch`, and where it says it is."""
    command = Command("watch", str(folder), "--listen", f"127.0.0.1:{port}", cwd=folder.parent)
    assert command.process.stdout is not None
    line = command.process.stdout.readline()
    found = ADDRESS.search(line)
    assert found is not None, line
    return command, found[0], int(found[1])


def end(command: Command) -> None:
    """As Ctrl-C does."""
    command.process.send_signal(signal.SIGINT)
    assert command.finish() == 0, command.err
    assert command.err == ""


def test_it_draws_follows_and_outlives_the_run_and_its_own_server(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "runs/it"
    with Command("train", *TRAIN, "--epochs", "1000", cwd=tmp_path) as run:
        wait_for_records(folder, 20)
        first, address, port = watch(folder)
        with first:
            browser.open(address)
            browser.wait_for(f"{BADGE} === 'running' && {FEED} === 'live'")
            drawn = browser.wait_for(CHARTS)
            browser.evaluate("document.querySelector('h2[id$=pace]').scrollIntoView()")
            browser.wait_for(f"{CHARTS} > {drawn}")  # what comes into sight is drawn
            seen = browser.wait_for(f"{UPDATES} > 0 && {UPDATES}")
            browser.wait_for(f"{UPDATES} > {seen}")
            assert browser.complaints == []
            end(first)
        browser.wait_for(f"{FEED}.startsWith('connection lost')")
        seen = browser.evaluate(UPDATES)
        second, _, port_again = watch(folder, port)
        with second:
            assert port_again == port, "a port that was just given up can be had again"
            browser.wait_for(f"{FEED} === 'live' && {UPDATES} > {seen}")
            refused = [line for line in browser.complaints if "ERR_CONNECTION_REFUSED" in line]
            assert browser.complaints == refused, "nothing but the browser's own words about the pause"

            run.process.send_signal(signal.SIGINT)
            assert run.finish() == 130
            browser.wait_for(f"{BADGE} === 'stopped'")
            assert browser.evaluate(f"{CHARTS} > {drawn}"), "what was drawn stays"
            assert browser.complaints == refused
            end(second)
