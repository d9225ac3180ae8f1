"""Damaged files of a run folder: every verb that reads them answers rightly or says in a line what it cannot read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import bit_flips
import pytest
import torch
from safetensors.torch import load_file, save

from paceline.analysis.listing import runs_of, weights_problem
from paceline.analysis.step_times import read_step_times
from paceline.analysis.timeline import TimeReports
from paceline.cli.main import main
from paceline.errors import UserError
from paceline.runs.events import EventLog, RowParser, parse_row, read_events
from paceline.runs.folder import RunFolder
from paceline.runs.result import weights_sha256
from paceline.runs.snapshots import read_best, read_index
from paceline.system.sealed_weights import check_weights, seal_weights
from paceline.system.strict_json import from_json, seal, to_json
from paceline.tasks.script_model import load_tensors
from tests.support.made_up_runs import accounts, log_events, progress, result_of, whole_run

pytestmark = pytest.mark.long  # left to `make test`

DEEP = b"[" * 20_000
ROWS = {
    "a NaN": b'{"kind": "progress", "now": NaN, "updates": 1, "samples": 32, "fraction": 0.5, "loss": 1.0}',
    "an infinity": b'{"kind": "progress", "now": 4.5, "updates": 1, "samples": 32, "fraction": 1e999, "loss": 1.0}',
    "a text for a time": b'{"kind": "progress", "now": "4.5", "updates": 1, "samples": 32, "fraction": 0.5}',
    "a text for a number": b'{"kind": "progress", "now": 4.5, "updates": 41, "samples": 32, "fraction": "x"}',
    "a text for a loss": b'{"kind": "progress", "now": 4.5, "updates": 41, "samples": 32, "loss": "x"}',
    "a number of 400 digits": b'{"kind": "progress", "now": 4.5, "updates": 1' + b"0" * 400 + b', "fraction": 0.5}',
    "a list for a worker": b'{"kind": "worker_lost", "now": 4.5, "worker": [1], "pushes": 3, "live": 1}',
    "a kind that is no text": b'{"kind": ["progress"], "now": 4.5}',
    "no kind": b'{"now": 4.5}',
    "deep nesting": b'{"kind": "reported", "now": 4.5, "figures": ' + DEEP,
    "text in a column": json.dumps({**accounts(4.5, [1.0, 2.0]), "computing": [1.0, "x"]}).encode(),
    "null in a column": json.dumps({**accounts(4.5, [1.0, 2.0]), "steps": [1, None]}).encode(),
    "a worker that is no number": json.dumps({**accounts(4.5, [1.0, 2.0]), "worker": [{}, "y"]}).encode(),
    "a list of pauses": json.dumps({**accounts(4.5, [1.0, 2.0]), "paused": [1]}).encode(),
    "a pause of one number": json.dumps({**accounts(4.5, [1.0, 2.0]), "paused": {"0": [1.0]}}).encode(),
    "a staleness of text": json.dumps({**accounts(4.5, [1.0, 2.0]), "stale": [["a", 1]]}).encode(),
    "a score of text": b'{"kind": "evaluation", "now": 4.5, "samples": 32, "test_accuracy": "high"}',
    "no bytes of UTF-8": b'{"kind": "stopped", "now": 4.5, "reason": "\xff\xfe"}',
}
VERBS = ("status", "report", "trace", "export", "watch", "list", "compare")


def old_rows(folder: RunFolder) -> None:
    """Remove the checksums of all rows, as older versions wrote them: types alone tell what is damaged."""
    folder.events_file.write_bytes(re.sub(rb', "crc32": "\w+"', b"", folder.events_file.read_bytes()))


def answer(verb: str, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of a verb, and what it prints."""
    more = {"report": ["-o", str(folder.path.parent / "page.html")], "export": ["--to", "csv"], "watch": ["--terminal"]}
    path = folder.path.parent if verb == "list" else folder.path
    capsys.readouterr()
    code = main([verb, str(path), *more.get(verb, [])])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_damaged_row_is_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str], row: bytes) -> None:
    folder = whole_run(tmp_path, end=False)
    old_rows(folder)
    whole = {verb: answer(verb, folder, capsys)[1] for verb in VERBS}
    with folder.events_file.open("ab") as file:
        file.write(row + b"\n")
    number = folder.events_file.read_bytes().count(b"\n")
    for verb in VERBS:
        code, text = answer(verb, folder, capsys)
        assert code == 0 and f"row {number} of {number} cannot be read and is ignored" in text, verb
        if verb in ("status", "trace"):
            assert text.splitlines()[0] == whole[verb].splitlines()[0], verb


def test_a_digit_that_changed_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = whole_run(tmp_path, end=False)
    content = folder.events_file.read_bytes()
    folder.events_file.write_bytes(content.replace(b'"updates": 40', b'"updates": 48', 1))
    code, text = answer("status", folder, capsys)
    assert code == 0 and "update 30" in text and "1 of" not in text and "cannot be read and is ignored" in text
    key = content.replace(b'"crc32"', b'"crc33"', 2)
    folder.events_file.write_bytes(key)
    parser = RowParser(folder.events_file)
    assert len(read_events(folder.events_file, parser)) + len(parser.damaged) == content.count(b"\n")


def test_rows_of_older_versions_before_rows_with_checksums(tmp_path: Path) -> None:
    folder = whole_run(tmp_path, end=False)
    old_rows(folder)
    log_events(folder, progress(5.0, 1600, 0.7))
    parser = RowParser(folder.events_file)
    assert read_events(folder.events_file, parser)[-1]["now"] == 5.0 and not parser.damaged


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("status", 7),
        ("reason", ["x"]),
        ("updates", "40"),
        ("updates", -1),
        ("train_seconds", "4.0"),
        ("samples_per_second", {}),
        ("test_accuracy", "81.5"),
        ("staleness", [1]),
        ("per_class_accuracy", "high"),
        ("utilisation", [None]),
        ("reported", {"0": ["x"]}),
        ("lost_workers", 3),
        ("environment", "one"),
        ("staleness_histogram", {"x": 1}),
    ],
)
def test_a_result_of_other_types_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    folder = whole_run(tmp_path)
    folder.result_file.write_text(json.dumps({**result_of(folder), name: value}))
    for verb in VERBS:
        code, text = answer(verb, folder, capsys)
        if verb == "trace":  # it needs none
            assert code == 0
        else:
            assert "result.json cannot be read (" in text and "Traceback" not in text, verb
            assert code == (2 if verb in ("status", "export") else 0), verb


def test_a_result_that_changed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = whole_run(tmp_path)
    assert json.loads(folder.result_file.read_text()) == seal(result_of(folder))
    folder.result_file.write_text(folder.result_file.read_text().replace("81.5", "91.5"))
    code, text = answer("status", folder, capsys)
    assert code == 2 and text.count("\n") == 1 and "its checksum is wrong" in text


def test_settings_that_changed_are_refused_by_every_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = whole_run(tmp_path)
    _, _, text = folder.config_file.read_text().partition("\n")  # without its checksum
    folder.config_file.write_text(text.replace("momentum = 0.9", "momentum = 0.1"))
    for verb in VERBS:
        code, text = answer(verb, folder, capsys)
        assert "belongs to another config than the config.toml beside it" in text, verb
        assert code == (2 if verb in ("status", "trace", "export") else 0), verb


@pytest.mark.parametrize(("old", "new"), [("keep = 2", "keep = 3"), ("# made = ", "# mad! = ")])
def test_settings_that_the_log_does_not_know_and_comments_have_a_checksum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    folder = whole_run(tmp_path)
    assert answer("status", folder, capsys)[0] == 0
    text = folder.config_file.read_text()
    folder.config_file.write_text(text.replace(old, new))
    assert text.count(old) == 1
    code, said = answer("status", folder, capsys)
    assert code == 2 and "config.toml was changed since the run wrote it" in said
    folder.config_file.write_text(text.replace(old, new).partition("\n")[2])
    assert answer("status", folder, capsys)[0] == 0


def test_a_damaged_run_does_not_keep_others_from_a_tracker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole_run(tmp_path, "a").result_file.write_text("{}")
    whole_run(tmp_path, "b")
    assert main(["export", str(tmp_path), "--to", "csv"]) == 2
    captured = capsys.readouterr()
    assert "result.json cannot be read (it has no status)" in captured.err and "/b: " in captured.out


def test_timings_of_other_types_are_no_timings(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    timed = {"steps": 40, "cpu": 0.1, "wall": 0.1, "waited": 0.1, "waited_least": 0.1, "quantiles": [1.0] * 33}
    for workers in ({"0": {**timed, "quantiles": "x"}}, {"0": {"cpu": 1.0}}, {"x": timed}, []):
        log_events(folder, {"kind": "timing", "now": 4.0, "server_cpu": 0.1, "cores": 2, "workers": workers})
    with pytest.raises(UserError, match="has no timing events"):
        read_step_times(folder.path)
    log_events(folder, {"kind": "timing", "now": 4.0, "server_cpu": 0.1, "cores": 2, "workers": {"0": timed}})
    assert read_step_times(folder.path).step_seconds == pytest.approx(0.1)


def test_no_text_of_a_file_reaches_the_terminal_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = whole_run(tmp_path, "run\x1b[2J", end=False)
    figures = {"kind": "reported", "now": 4.0, "worker": 0, "samples": 9, "figures": {"acc\x1b[31m\u202e": 1.0}}
    log_events(folder, figures, {"kind": "turned_away", "now": 4.0, "text": "\x07\ud800 hello"})
    for verb in VERBS:
        code, text = answer(verb, folder, capsys)
        assert code == 0 and all(letter.isprintable() or letter == "\n" for letter in text), verb
    assert "acc\\x1b[31m\\u202e 1 (worker 0)" in " ".join(answer("status", folder, capsys)[1].split())
    folder.write_result(result_of(folder, "stopped", reason="\x1b]0;title\x07"))
    for verb in VERBS:
        text = answer(verb, folder, capsys)[1]
        assert all(letter.isprintable() or letter == "\n" for letter in text), verb
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert main(["status", "no\x1b[2Jwhere"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def weights(**texts: str) -> bytes:
    return seal_weights(save({"b": torch.arange(3.0), "a": torch.ones(2, 2, dtype=torch.bfloat16)}, texts))


def test_sealed_weights_are_read_as_before_and_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path, content = tmp_path / "weights.safetensors", weights(updates="7")
    path.write_bytes(content)
    tensors = load_file(path)
    assert torch.equal(tensors["b"], torch.arange(3.0)) and tensors["a"].dtype == torch.bfloat16
    check_weights(path, weights_sha256(tensors))
    with pytest.raises(ValueError, match="not those of result"):
        check_weights(path, "0" * 64)
    for place in range(0, 8 * len(content), 7):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            check_weights(path)
        except ValueError:
            continue
        found = load_file(path)  # a bit of the name of the checksum, or of a blank
        assert weights_sha256(found) == weights_sha256(tensors) and {*found} == {*tensors}


@pytest.mark.parametrize("name", ["weights.safetensors", "live.safetensors", "checkpoints/best.safetensors"])
def test_list_and_compare_name_weights_that_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = whole_run(tmp_path)
    (folder.path / "checkpoints").mkdir()
    content = weights()
    (folder.path / name).write_bytes(content)
    assert runs_of([folder.path])[0][0]["problem"] is None
    (folder.path / name).write_bytes(content[:-1] + b"\x01")
    for verb in ("list", "compare"):
        code, text = answer(verb, folder, capsys)
        assert code == 0 and f"{Path(name).name} is damaged, do not use it" in text and "finished" in text


def test_weights_of_another_run_are_not_those_of_the_result(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    folder.weights_file.write_bytes(weights())
    result = {"weights_sha256": weights_sha256(load_file(folder.weights_file))}
    assert weights_problem(folder, result) is None
    assert "not those of result.json" in str(weights_problem(folder, {"weights_sha256": "0" * 64}))


def test_other_files_that_changed_are_one_line(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    folder.checkpoints.mkdir()
    folder.snapshots.mkdir()
    folder.best_file.write_bytes(weights(updates="7")[:-1] + b"\x01")
    with pytest.raises(UserError, match=r"best\.safetensors cannot be read .*remove it"):
        read_best(folder)
    folder.frozen_file.write_bytes(weights()[:-1] + b"\x01")
    with pytest.raises(UserError, match=r"frozen\.safetensors cannot be read"):
        load_tensors(folder.frozen_file)
    rows = {"snapshots": [{"version": 3, "samples": 96, "epochs": 0.5, "sha256": "0", "extra": False}]}
    (folder.snapshots / "index.json").write_text(to_json(seal(rows)))
    assert read_index(folder)[0].samples == 96
    (folder.snapshots / "index.json").write_text(to_json(seal(rows)).replace("96", "97"))
    with pytest.raises(UserError, match="its checksum is wrong"):
        read_index(folder)
    folder.server_file.write_text(to_json(seal({"address": "127.0.0.1:1", "by_hand": True})).replace(":1", ":2"))
    with pytest.raises(UserError, match=r"server\.json cannot be read"):
        folder.served()
    folder.server_file.write_text("[]")
    with pytest.raises(UserError, match=r"server\.json cannot be read"):
        folder.served()


@pytest.mark.parametrize("text", ["[NaN]", "[-Infinity]", "[1e999]", "1" + "0" * 400, "9" * 5000, "[" * 100_000, "{"])
def test_json_that_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        from_json(text)


def test_a_row_is_read_as_it_was_written(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        nbytes = log.write("reported", 1.5, worker=1, figures={"é": 0.1, "x": None}, text='a "b" \\ c')
    content = (tmp_path / "events.jsonl").read_bytes()
    assert len(content) == nbytes and json.loads(content)["crc32"]
    row = parse_row(content[:-1])
    assert row == {"kind": "reported", "now": 1.5, "worker": 1, "figures": {"é": 0.1, "x": None}, "text": 'a "b" \\ c'}


def test_accounts_of_workers_that_the_settings_do_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = whole_run(tmp_path, end=False)
    log_events(folder, {**accounts(4.5, [1.0, 2.0]), "worker": [70_000, 70_001]})
    assert answer("report", folder, capsys)[0] == 0
    assert TimeReports.of(read_events(folder.events_file), folder.config()).rows[70_000]


@pytest.mark.long
@pytest.mark.parametrize("old", [False, True], ids=["with checksums", "without"])
def test_random_flips(tmp_path: Path, old: bool) -> None:
    """A small version of benchmarks/bit_flips.py: the most sensitive files and the quick verbs."""
    bit_flips.make_runs(tmp_path, old)
    said: list[str] = []
    bad = bit_flips.BAD[1:] if old else bit_flips.BAD
    verbs = ["list", "status", "report", "trace", "export", "watch"]
    files = ["events", "result", "config", "weights"]
    found = bit_flips.measure(tmp_path, 14, 5, verbs, files, said.append, bad)
    assert not said
    assert sum(counts.total() for counts in found.values()) == 14 * len(verbs)


def test_weights_that_are_gone_are_named(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    folder.weights_file.unlink(missing_ok=True)
    assert weights_problem(folder, {"weights_sha256": "0" * 64}) == "weights.safetensors is missing"
    assert weights_problem(folder, {}) is None
