"""Traces: valid by the published format, and true to what the simulation knows its workers did."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.errors import UserError
from paceline.reports.chrome_trace import TraceWindow, write_trace
from paceline.runs.events import read_events
from paceline.runs.folder import RunFolder

FAULTS = """
[[fault]]
kind = "crash"
worker = 1
at = 1.0
restart_after = 0.5
[[fault]]
kind = "crash"
worker = 2
at = 2.0
[[fault]]
kind = "server"
at = 2.5
"""


def simulate(folder: Path, *flags: str) -> RunFolder:
    speeds = ["--speeds", "lognormal:30ms,.3*1,1,1,2", "--workers", "4", "--timing-only", "--steps", "120"]
    assert main(["simulate", *speeds, *flags, "--runs", str(folder), "--name", "run"]) == 0
    return RunFolder(folder / "run")


def load(file: Path) -> dict[str, Any]:
    """Strictly: a NaN is no JSON."""
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    whole: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return whole


def trace_of(folder: RunFolder, part: TraceWindow | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    file = folder.path / "trace.json"
    count, notes = write_trace(folder.path, file, part or TraceWindow())
    whole = load(file)
    assert len(whole["traceEvents"]) == count and whole["otherData"]["notes"] == notes
    check_format(whole)
    return whole["traceEvents"], notes


def check_format(whole: dict[str, Any]) -> None:
    """What the Trace Event Format asks of the phases we use: X, C, i, s, f and M."""
    assert whole["displayTimeUnit"] in ("ms", "ns")
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    arrows: dict[str, Counter[Any]] = {"s": Counter(), "f": Counter()}
    for event in whole["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= event.keys()
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0 and math.isfinite(event["ts"])
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0
                tracks[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
            case "C":
                assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values())
            case "i":
                assert event["s"] in ("g", "p", "t")
            case "s" | "f":
                arrows[event["ph"]][event["cat"], event["name"], event["id"]] += 1
                assert event["ph"] == "s" or event["bp"] == "e"
            case "M":
                assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
                assert set(event["args"]) == {"sort_index" if event["name"].endswith("index") else "name"}
            case other:
                raise AssertionError(f"phase {other}")
    assert arrows["s"] == arrows["f"] and set(arrows["s"].values()) <= {1}
    named = {(event["pid"], event["tid"]) for event in whole["traceEvents"] if event["name"] == "thread_name"}
    assert tracks.keys() <= named
    for spans in tracks.values():
        for (begin, lasts), (later, _) in pairwise(sorted(spans)):
            assert begin + lasts <= later + 2e-3, "spans of a track overlap"
    for event in whole["traceEvents"]:
        if event["ph"] in "sf":
            here = tracks[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] <= begin + lasts for begin, lasts in here), "an arrow hangs in the air"


def seconds(events: list[dict[str, Any]]) -> dict[int, Counter[str]]:
    """What each worker did, summed over its track."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[int, Counter[str]] = defaultdict(Counter)
    for event in events:
        if event["ph"] == "X" and names[event["tid"]].startswith("worker "):
            found[int(names[event["tid"]].split()[1])][event["name"]] += event["dur"] / 1e6
    return found


@pytest.mark.parametrize(
    "flags",
    [
        ["--strategy", "sync"],
        ["--strategy", "sync", "--link", "100mbit,5ms"],
        ["--strategy", "async", "--link", "1gbit,5ms"],
        ["--strategy", "bounded:2"],
        ["--strategy", "backup:1"],
        ["--strategy", "async", "--rule", "ringmaster:2"],
        ["--strategy", "allreduce"],
        ["--strategy", "diloco:4"],
        ["--strategy", "async-local:4"],
    ],
    ids=" ".join,
)
def test_tracks_are_what_the_simulation_knows_of_its_workers(tmp_path: Path, flags: list[str]) -> None:
    folder = simulate(tmp_path, *flags)
    events, notes = trace_of(folder)
    assert not notes
    account = [row for row in read_events(folder.events_file) if row["kind"] == "workers"][-1]
    whole = account["now"]
    for worker, sums in seconds(events).items():
        unfinished = whole / account["pushes"][worker]  # a push that never came is in the account, not in the log
        for kind in ("computing", "sending", "waiting"):
            assert sums[kind] == pytest.approx(account[kind][worker], abs=1.5 * unfinished + 0.01 * whole), (
                worker,
                kind,
            )
    result = folder.result()
    assert result is not None
    updates = [event for event in events if event["ph"] == "X" and event["cat"] == "server"]
    assert [event["args"]["version"] for event in updates] == list(range(1, result["updates"] + 1))
    taken = sum(event["args"].get("fate") == "taken" for event in events if event["ph"] == "X")
    assert sum(event["args"]["pushes"] for event in updates) == sum(event["ph"] == "s" for event in events) == taken
    dropped = sum(event["args"].get("fate") == "dropped" for event in events if event["ph"] == "X")
    assert dropped == result["dropped_pushes"]


def test_losses_joins_and_a_killed_server_are_seen(tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text(FAULTS)
    folder = simulate(tmp_path, "--strategy", "async", "--faults", str(tmp_path / "faults.toml"), "--steps", "400")
    events, _ = trace_of(folder)
    dead = {event["tid"]: event for event in events if event["ph"] == "X" and event["name"] == "dead"}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    by_name = {names[tid]: event for tid, event in dead.items()}
    assert {"worker 1", "worker 2"} <= by_name.keys()
    happened = Counter(event["name"] for event in events if event["ph"] == "i")
    assert happened["worker lost"] >= 2 and happened["fault"] == 3 and happened["run resumed"] == 1
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert {"version", "staleness", "samples/s"} <= counters


def test_many_pushes_become_one_span_and_none_of_the_time_is_lost(tmp_path: Path) -> None:
    folder = simulate(tmp_path, "--strategy", "sync", "--link", "100mbit,5ms")
    fine, _ = trace_of(folder)
    coarse, notes = trace_of(folder, TraceWindow(max_pushes=48))
    assert len(coarse) < len(fine) / 4
    assert "480 pushes are too many to draw one by one: each span covers 10" in notes[0]
    for worker, sums in seconds(fine).items():
        for kind, value in sums.items():
            assert seconds(coarse)[worker][kind] == pytest.approx(value, rel=1e-6)
    part, notes = trace_of(folder, TraceWindow(begin=1.0, end=2.0, max_pushes=480))
    assert not notes and 0 < len(part) < len(fine) / 2
    assert all(1e6 <= event["ts"] <= 2e6 for event in part if event["ph"] != "M")


def test_a_log_that_was_cut_is_drawn_up_to_there(tmp_path: Path) -> None:
    folder = simulate(tmp_path, "--strategy", "async")
    whole, _ = trace_of(folder)
    folder.arrivals_file.write_bytes(folder.arrivals_file.read_bytes()[:-1000])
    folder.events_file.write_bytes(folder.events_file.read_bytes()[:-30])
    cut, notes = trace_of(folder)
    assert len(cut) < len(whole)
    assert any("arrivals.log is cut off or damaged after" in note for note in notes)
    folder.events_file.unlink()
    assert seconds(trace_of(folder)[0]).keys() == {0, 1, 2, 3}


def test_the_verb_writes_compressed_where_the_name_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = simulate(tmp_path, "--strategy", "async")
    assert main(["trace", str(folder.path)]) == 0
    file = folder.path / "trace.json.gz"
    assert f"{file}: " in capsys.readouterr().out
    check_format(load(file))
    before = file.read_bytes()
    assert main(["trace", str(folder.path)]) == 0 and file.read_bytes() == before
    assert main(["trace", str(folder.path), "-o", str(tmp_path / "part.json"), "--from", "0.5", "--to", "1"]) == 0
    check_format(load(tmp_path / "part.json"))
    assert not list(folder.path.glob(".trace*"))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--from", "2", "--to", "1"], "--from 2 --to 1: give a second of training and a later one"),
        (["--pushes", "0"], "--pushes must be at least 1, got 0"),
        (["-o", "/nowhere/at/all.json"], "/nowhere/at/all.json cannot be written: No such file or directory"),
    ],
)
def test_a_bad_request_is_one_line(
    tmp_path: Path, flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = simulate(tmp_path, "--strategy", "async")
    capsys.readouterr()
    assert main(["trace", str(folder.path), *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    folder.arrivals_file.unlink()
    with pytest.raises(UserError, match=r"has no arrivals.log, which a trace needs: the run never started"):
        write_trace(folder.path, tmp_path / "t.json", TraceWindow())
