"""The digest of a run: whole, going on, cut off, damaged, resumed, huge; always bounded, always JSON."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.analysis.status import read_status
from paceline.analysis.tail import RECORDS
from paceline.cli.output import show
from paceline.core.messages import Disposition
from paceline.errors import UserError
from paceline.reports.report_data import MAX_BARS, RunReader, bars, run_names
from paceline.reports.time_series import MAX_SPANS, TimeSeries
from paceline.runs import arrival_log as arrivals
from paceline.runs.folder import RunFolder
from tests.support.made_up_runs import (
    accounts,
    as_json,
    log_events,
    log_inputs,
    make_folder,
    progress,
    push,
    result_of,
    started,
    taken_back,
    whole_run,
)


def digest_of(folder: RunFolder) -> dict:  # type: ignore[type-arg]
    reader = RunReader(folder.path)
    assert reader.refresh()
    found = reader.digest()
    assert json.loads(as_json(found)) == found
    return found


def test_a_whole_run(tmp_path: Path) -> None:
    found = digest_of(whole_run(tmp_path))
    assert found["status"] == "finished"
    assert found["verdict"] == (
        "Finished: 81.50 % test accuracy (averaged weights) after 1,280 samples, in 4 s on 2 workers (320 samples/s)."
    )
    assert found["closing"][0] == "finished: lenet5 on fashion-mnist, async, 2 workers"
    assert "training time: 4 s; 40 updates, 1,280 samples, 320 samples/s" in found["closing"]
    assert found["notes"] == []
    assert found["course"]["samples"][-1] == 1280
    assert found["course"]["loss"][0] == 2.0
    assert found["scores"]["test_accuracy"] == [20, 40, 60, 80, 81.5]
    assert found["per_class"][0] == ["T-shirt/top", 80.0]
    assert found["staleness"] == [[0, 0, 1], [1, 1, 9]]
    assert found["progress"]["norm"] == [6, 7, 8, 9]
    assert [lane["segments"][-1] for lane in found["timeline"]["lanes"]] == [[3.0, 4.0, 90, 0, 10, 0, 0]] * 2
    assert found["timeline"]["lanes"][0]["here"] == [[0.0, 4.0]]


@pytest.mark.parametrize(
    ("settings", "title", "dataset"),
    [
        ({"strategy": "sync", "model": "cnn"}, "sync, cnn on fashion-mnist", "fashion-mnist"),
        ({"task": "mine/spirals.py:build"}, "async, spirals:build", "spirals:build"),
        ({"task": "mine.spirals:build"}, "async, spirals:build", "spirals:build"),
        ({"task": "script:own_loop"}, "async, own_loop.py", "own_loop.py"),
        ({"task": "spirals"}, "async, spirals", "spirals"),
    ],
)
def test_the_headline_names_strategy_model_and_data(settings: dict[str, str], title: str, dataset: str) -> None:
    given = {"strategy": "async", "model": "lenet5", "dataset": "fashion-mnist", **settings}
    assert (run_names(given)["title"], run_names(given)["dataset"]) == (title, dataset)


def test_the_applied_rule_and_what_a_loop_reported(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    scores = {f"test_{what}": None for what in ("accuracy", "loss", "correct", "total")}
    loop = {"reported": {"0": {"f1": 0.75}}, "rule_applied": "foresight (step limited) (averaged)", **scores}
    folder.write_result(result_of(folder, **loop))
    found = digest_of(folder)
    assert found["figures"]["rule"] == "foresight (step limited)"
    assert found["figures"]["metrics"] == {"f1": 0.75}
    folder.events_file.unlink()
    assert digest_of(folder)["verdict"].startswith("Finished: f1 0.75 (reported by the script) after 1,280 samples")


def test_each_metric_of_a_loop_has_the_curve_of_its_lowest_worker_wherever_the_events_are_cut(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    reader = RunReader(folder.path)
    rows = [{"worker": 1, "figures": {"f1": 0.1}}, {"worker": 0, "figures": {"f1": 0.2, "loss": None}}, {"worker": 0}]
    rows += [{"worker": 1, "figures": {"f1": 0.3}}, {"worker": 0, "figures": {"f1": 0.4, "loss": 0.5}}]
    log_events(folder, started())
    for number, row in enumerate(rows):
        log_events(folder, {"kind": "reported", "now": 1.0 + number, "samples": 32 * number, **row})
        reader.refresh()
    expected = {"f1": ([2, 5], [32, 128], [0.2, 0.4]), "loss": ([2, 5], [32, 128], [None, 0.5])}
    expected_columns = {name: dict(zip(("t", "samples", "value"), one, strict=True)) for name, one in expected.items()}
    assert reader.digest()["reported"] == digest_of(folder)["reported"] == expected_columns


def test_a_loss_that_explodes_within_a_span_begins_where_it_began(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    log_events(folder, started())
    losses = [2.3, 1e20, 1e20, 5.0]
    log_inputs(folder, [(push(0, seq, loss), 1e-4 * (seq + 1)) for seq, loss in enumerate(losses)])
    log_inputs(folder, [(push(0, 4, 3.0), 1000.0)])
    course = digest_of(folder)["course"]
    assert course["loss"][0] == course["low"][0] == course["high"][0] == 2.3
    assert course["samples"] == [32, 128, 160] and course["count"] == [1, 4, 1]


def test_nothing_moves_in_one_process(tmp_path: Path) -> None:
    """Also in folders whose result counted what stayed in the process."""
    found = digest_of(whole_run(tmp_path, strategy="classic", workers=1))
    assert (found["figures"]["bytes_pushed"], found["figures"]["bytes_pulled"]) == (0, 0)
    assert "bytes_pushed" not in found["progress"]


@pytest.mark.parametrize(
    ("program", "shown"),
    [("/bin/paceline", "paceline"), ("/x/paceline/__main__.py", "python -m paceline"), ("train.py", "train.py")],
)
def test_the_command_that_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, shown: str) -> None:
    monkeypatch.setattr("sys.argv", [program, "train", "--name", 'a "b"\n'])
    folder = whole_run(tmp_path)
    found = digest_of(folder)
    assert found["command"] == f"{shown} train --name 'a \"b\"\n'"
    folder.update_config(folder.config())
    assert digest_of(folder)["command"] == found["command"]
    assert digest_of(folder)["made"] == found["made"]


def test_the_columns_are_the_records_of_the_log() -> None:
    assert RECORDS.itemsize == arrivals.RECORD_BYTES
    row = (2, 1, 65535, 3, 4, 5, 6, 0.5, 7.25)
    packed = struct.pack("<BBHIIIIfd", *row) + b"\0\0\0\0"
    assert np.frombuffer(packed, RECORDS)[0].item()[:-1] == row


def test_a_reader_follows_what_is_appended_and_says_whether_it_was(tmp_path: Path) -> None:
    folder = whole_run(tmp_path, end=False)
    reader = RunReader(folder.path)
    with folder.locked():
        assert reader.refresh()
        assert not reader.refresh()
        assert (reader.digest()["status"], reader.digest()["going_on"]) == ("running", True)
        log_inputs(folder, [(push(0, 20 + one, 0.5), 4.0 + one) for one in range(1, 5)])
        log_events(folder, progress(8.0, 1408, 0.8))
        assert reader.refresh()
        found = reader.digest()
    assert found["course"]["samples"][-1] == 1280 + 4 * 32
    assert found["figures"]["seconds_left"] == 2.1, "the last fifth, as fast as from 1/8 to 4/5 in seven seconds"
    assert reader.refresh(), "nobody trains into it any more"
    assert reader.digest()["verdict"].startswith("Ended without a result")
    folder.write_result(result_of(folder))
    assert reader.refresh()
    assert reader.digest()["status"] == "finished"
    assert as_json(reader.digest()) == as_json(digest_of(folder))


@pytest.mark.parametrize("cuts", [[0], [10, 37, 38, 72], [60, 500, 501, 1400], [1, 1500, 3000]])
def test_read_in_pieces_or_at_once_it_is_the_same(cuts: list[int], tmp_path: Path) -> None:
    whole = whole_run(tmp_path)
    events, log = whole.events_file.read_bytes(), whole.arrivals_file.read_bytes()
    whole.events_file.write_bytes(b"")
    whole.arrivals_file.write_bytes(b"")
    reader = RunReader(whole.path)
    for cut in cuts:
        whole.events_file.write_bytes(events[:cut])
        whole.arrivals_file.write_bytes(log[:cut])
        reader.refresh()
    whole.events_file.write_bytes(events)
    whole.arrivals_file.write_bytes(log)
    reader.refresh()
    assert as_json(reader.digest()) == as_json(digest_of(whole))


def test_a_cut_off_event_file_shows_its_good_part_and_says_the_rest(tmp_path: Path) -> None:
    folder = whole_run(tmp_path, end=False)
    content = folder.events_file.read_bytes()
    folder.events_file.write_bytes(content[:-30])
    found = digest_of(folder)
    rows = content.count(b"\n") - 1
    assert any(f"events.jsonl is cut off after row {rows}" in note for note in found["notes"])
    assert found["scores"]["test_accuracy"] == [20, 40, 60]


def test_rows_that_are_none_are_named_and_left_out(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    lines = folder.events_file.read_bytes().split(b"\n")
    lines[2:2] = [b"\xff\xfe nonsense", b"[1, 2]", b'{"kind": 3}']
    folder.events_file.write_bytes(b"\n".join(lines))
    found = digest_of(folder)
    assert any("rows 3, 4, 5 of" in note for note in found["notes"])
    assert found["scores"]["test_accuracy"] == [20, 40, 60, 80, 81.5]


def test_a_damaged_log_is_shown_up_to_its_damage(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    content = bytearray(folder.arrivals_file.read_bytes())
    content[-10 * arrivals.RECORD_BYTES] ^= 0xFF
    folder.arrivals_file.write_bytes(content)
    found = digest_of(folder)
    assert found["course"]["samples"][-1] == 30 * 32
    assert any("arrivals.log is damaged at byte" in note for note in found["notes"])
    folder.arrivals_file.write_bytes(content[:100])
    assert any("torn record" in note for note in digest_of(folder)["notes"])


def test_a_log_of_something_else_gives_way_to_the_progress_rows(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    folder.arrivals_file.write_bytes(b"something else\n" * 50)
    found = digest_of(folder)
    assert found["course"]["samples"] == [320, 640, 960, 1280]
    assert any("not a log of this version" in note for note in found["notes"])


def test_what_a_resume_took_back_does_not_count(tmp_path: Path) -> None:
    folder = whole_run(tmp_path, end=False)
    reader = RunReader(folder.path)
    reader.refresh()
    assert reader.digest()["course"]["samples"][-1] == 1280
    taken_back(folder, undone=10, now=4.0)
    log_events(folder, started(4.0, "run_resumed"))
    log_inputs(folder, [(push(0, 99), 5.0)])
    reader.refresh()
    assert reader.digest()["course"]["samples"][-1] == 31 * 32
    assert as_json(reader.digest()) == as_json(digest_of(folder))
    assert reader.digest()["figures"]["resumes"] == 1


def test_dropped_pushes_count_for_nothing(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    log_inputs(folder, [(push(0, 50), 5.0)], Disposition.DROPPED)
    assert digest_of(folder)["course"]["samples"][-1] == 1280


def test_two_lives_of_a_worker_are_two_stays(tmp_path: Path) -> None:
    folder = whole_run(tmp_path, end=False)
    rows = [{"kind": "worker_lost", "now": 4.5, "worker": 1, "pushes": 20, "live": 1}]
    rows.append({"kind": "worker_joined", "now": 6.0, "worker": 1, "incarnation": 1, "threads": 1})
    log_events(folder, *rows, progress(8.0, 1280, 0.5))
    found = digest_of(folder)
    assert [lane["here"] for lane in found["timeline"]["lanes"]] == [[[0, 8]], [[0, 4.5], [6, 8]]]
    assert [one["text"] for one in found["happenings"]] == [
        "Worker 1 was lost after 20 pushes; 1 live",
        "Worker 1 joined",
    ]


@pytest.mark.parametrize("left", [[], ["events.jsonl"], ["result.json"], ["events.jsonl", "arrivals.log"]])
def test_whatever_is_missing_there_is_a_digest(tmp_path: Path, left: list[str]) -> None:
    folder = whole_run(tmp_path)
    for file in folder.path.iterdir():
        if file.name != "config.toml" and file.name not in left:
            file.unlink()
    found = digest_of(folder)
    assert found["status"] == ("finished" if "result.json" in left else "killed")
    assert found["verdict"]
    if "events.jsonl" not in left:
        assert any("events.jsonl is missing" in note for note in found["notes"])


def test_settings_or_a_result_that_cannot_be_read_are_told_of(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    folder.result_file.write_text('{"status": ')
    found = digest_of(folder)
    assert (found["status"], len(found["notes"])) == ("killed", 1)
    assert "result.json cannot be read" in found["notes"][0]
    folder.config_file.write_text("= nonsense")
    found = digest_of(folder)
    assert found["status"] == "damaged"
    assert found["scores"]["test_accuracy"] == [20, 40, 60, 80]


def test_a_result_that_lacks_things_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    folder.write_result({"status": "finished", "test_accuracy": 50.0})
    assert digest_of(folder)["verdict"].startswith("Finished: 50.00 % test accuracy")


def test_a_stopped_run_has_the_scores_of_its_way(tmp_path: Path) -> None:
    folder = whole_run(tmp_path, end=False)
    folder.write_result({"status": "stopped", "reason": "interrupted", "test_accuracy": None, "samples": 1280})
    found = digest_of(folder)
    assert found["verdict"].startswith(
        "Stopped early (interrupted): 80.00 % test accuracy (averaged weights) at the last evaluation, after 1,280"
    )
    assert found["figures"]["scored_early"] and found["figures"]["test_accuracy"] == 80.0
    assert not digest_of(whole_run(tmp_path / "other"))["figures"]["scored_early"]


def test_a_diverged_run_says_why(tmp_path: Path) -> None:
    folder = whole_run(tmp_path, end=False)
    log_inputs(folder, [(push(0, 50, float("nan")), 5.0)], Disposition.REJECTED)
    log_inputs(folder, [(push(1, 50, float("inf")), 5.0)])
    folder.write_result(result_of(folder, "diverged", reason="training diverged at update 40: try --lr 0.001"))
    found = digest_of(folder)
    assert found["verdict"] == "Training diverged at update 40: try --lr 0.001."


def test_a_folder_that_is_made_anew_is_read_anew(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    reader = RunReader(folder.path)
    reader.refresh()
    for file in folder.path.iterdir():
        file.unlink()
    folder.path.rmdir()
    whole_run(tmp_path, pushes=10)
    assert reader.refresh()
    assert as_json(reader.digest()) == as_json(digest_of(folder))


def test_what_is_no_run_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a run folder: it has no config\.toml"):
        RunReader(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        RunReader(tmp_path / "nowhere")


def test_ten_thousand_workers_share_lanes(tmp_path: Path) -> None:
    count = 10_000
    folder = make_folder(tmp_path, workers=count, speeds="1s")
    rows = [started(), *({"kind": "worker_joined", "now": 0.0, "worker": one} for one in range(count))]
    rows += [accounts(0.0, [0.0] * count), accounts(10.0, [5.0] * count, ["lost"] * 100 + ["live"] * (count - 100))]
    folder.events_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    log_events(folder, progress(10.0, 3200, 0.5, live=count))
    found = digest_of(folder)
    lanes = found["timeline"]["lanes"]
    assert sum(lane["size"] for lane in lanes) == count
    assert lanes[0]["name"] == "0–208"
    assert lanes[0]["segments"][0][2] > 30
    assert lanes[0]["segments"][0][-1] > 10
    assert lanes[-1]["segments"] == [[0.0, 10.0, 50, 0, 50, 0, 0]]
    assert len(as_json(found)) < 60_000


def test_however_long_the_run_its_digest_is_bounded_and_keeps_the_extremes(tmp_path: Path) -> None:
    course = TimeSeries("loss")
    now = np.arange(200_000) / 7.0
    loss = np.ones(200_000)
    loss[123_456] = 99.0
    for part in np.array_split(np.arange(200_000), 37):
        course.add(now[part], {"loss": loss[part]})
    assert MAX_SPANS / 2 <= len(course.times) <= MAX_SPANS
    assert course.greatest("loss").max() == 99.0
    assert course.count.sum() == 200_000
    assert course.times[-1] == now[-1]


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 100)), max_size=60, unique_by=lambda pair: pair[0]))
def test_a_histogram_loses_nobody(pairs: list[tuple[int, int]]) -> None:
    found = bars([list(pair) for pair in pairs])
    assert len(found) <= MAX_BARS
    assert sum(count for _, _, count in found) == sum(count for _, count in pairs)
    assert all(low <= high for low, high, _ in found)


def test_many_events_of_one_kind_are_told_first_and_last(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    lost = [{"kind": "worker_lost", "now": float(one), "worker": one % 2, "pushes": 1, "live": 1} for one in range(500)]
    log_events(folder, started(), *lost)
    found = digest_of(folder)
    assert (len(found["happenings"]), found["happenings_left_out"]) == (200, 300)
    assert found["happenings"][-1]["t"] == 499


def test_the_end_of_a_run_its_page_and_its_status_divide_the_time_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result knows only computing and waiting."""
    folder = whole_run(tmp_path)
    server = {"server": [2.36, 2.36], "waiting": [0.04, 0.04], "state": ["done", "done"]}
    log_events(folder, accounts(4.0, [1.6, 1.6], **server))
    result = result_of(folder, utilisation=[{"computing": 0.39, "waiting": 0.61}] * 2)
    folder.write_result(result)
    said = "workers: 40 % computing, 59 % at the server, 1 % waiting"
    assert show(folder, folder.result() or {}, as_json=False) == 0
    assert said in capsys.readouterr().out
    assert said in digest_of(folder)["closing"]
    (first, _) = read_status(folder.path).workers
    assert first.shares == {"computing": 0.4, "waiting": 0.01, "server": 0.59}
