"""Ctrl-C and SIGTERM: never in the middle of an import, and never lost."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from paceline.cli.main import raise_on_signals
from paceline.system import signals
from paceline.system.signals import PRESS_SECONDS, handle_signals, leave_signal, stop_signals
from tests.support.waiting import until

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that sends a signal to its own process in the middle of being imported."""
    name = "sends_a_signal_half_way"
    (tmp_path / f"{name}.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\nwhole = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_at_once_and_the_handlers_before_come_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in (*SIGNALS, signal.SIGALRM)]
    with pytest.raises(KeyboardInterrupt), raise_on_signals():
        signal.raise_signal(number)
    assert [signal.getsignal(each) for each in (*SIGNALS, signal.SIGALRM)] == before


def test_during_an_import_it_waits_until_the_module_is_whole(half_way: str) -> None:
    with pytest.raises(KeyboardInterrupt), raise_on_signals():
        try:
            __import__(half_way)
        except KeyboardInterrupt:
            pytest.fail("the import was interrupted")
        until(lambda: False, "the signal that waited for the import")
    assert sys.modules[half_way].whole
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_one_that_waits_is_raised_before_other_handlers_take_over(half_way: str) -> None:
    with pytest.raises(KeyboardInterrupt), raise_on_signals():
        __import__(half_way)
        with handle_signals(lambda number, frame: None):
            pytest.fail("it was not told of the signal")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_run_handles_them_in_its_own_way() -> None:
    came: list[int] = []
    with raise_on_signals(), handle_signals(lambda number, frame: came.append(number)):
        for number in SIGNALS:
            signal.raise_signal(number)
    assert came == SIGNALS


def test_a_worker_may_finish_what_it_does_before_it_leaves() -> None:
    with raise_on_signals(), leave_signal(seconds=60.0) as is_leaving:
        assert not is_leaving()
        signal.raise_signal(signal.SIGTERM)
        assert is_leaving()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def test_a_worker_that_does_not_finish_is_interrupted() -> None:
    with raise_on_signals(), pytest.raises(KeyboardInterrupt), leave_signal(seconds=0.01):
        signal.raise_signal(signal.SIGTERM)
        signal.pause()


def test_an_interrupt_does_not_wait() -> None:
    with raise_on_signals(), pytest.raises(KeyboardInterrupt), leave_signal(seconds=60.0):
        signal.raise_signal(signal.SIGINT)


def test_a_ctrl_c_pressed_twice_asks_once_and_a_later_one_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    told: list[object] = []
    with pytest.raises(KeyboardInterrupt), stop_signals(told.append) as reasons:
        signal.raise_signal(signal.SIGINT)
        now += PRESS_SECONDS / 20
        signal.raise_signal(signal.SIGINT)
        assert reasons == ["interrupted"] and len(told) == 1
        now += PRESS_SECONDS
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it still waits")
