"""Tables of faults: what is read, what is refused and how, and that a table written is the table read."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.randomness import rng
from paceline.settings.fault_table import MISFORTUNES, Fault, check_faults, faults_toml, random_faults, read_faults

EVERYTHING = """
[[fault]]
kind = "server"
at = 9
lasts = "2s"

[[fault]]
kind = "crash"
at = "500ms"
worker = 1
restart_after = 0.25
noticed_after = "100ms"

[[fault]]
kind = "slow"
at = 0.5
worker = 0
lasts = 3
factor = 4

[[fault]]
kind = "lose"
at = 0
worker = 2
message = "reply"
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "faults.toml"
    file.write_text(text)
    return file


def test_rows_are_read_with_their_units_and_ordered_by_time_then_place(tmp_path: Path) -> None:
    assert read_faults(written(tmp_path, EVERYTHING), 3) == (
        Fault("lose", 0.0, 2, message="reply"),
        Fault("crash", 0.5, 1, restart_after=0.25, noticed_after=0.1),
        Fault("slow", 0.5, 0, lasts=3.0, factor=4.0),
        Fault("server", 9.0, lasts=2.0),
    )


def test_a_table_without_rows_is_a_run_without_faults(tmp_path: Path) -> None:
    assert read_faults(written(tmp_path, "# nothing goes wrong\n"), 1) == ()
    assert faults_toml(()) == ""


@pytest.mark.parametrize("seed", range(200))
def test_a_random_table_makes_sense_and_survives_being_written(tmp_path: Path, seed: int) -> None:
    num_workers, horizon = 1 + seed % 5, 10.0 ** (seed % 7 - 4)
    faults = random_faults(rng(seed, "faults"), num_workers, horizon, most=6)
    assert 1 <= len(faults) <= 6
    assert all(fault.at <= horizon for fault in faults)
    check_faults(faults, num_workers)
    assert read_faults(written(tmp_path, faults_toml(faults)), num_workers) == faults
    assert faults == random_faults(rng(seed, "faults"), num_workers, horizon, most=6)


def test_random_tables_hold_every_kind_and_seldom_kill_everybody_for_good() -> None:
    tables = [random_faults(rng(seed, "faults"), 2, 10.0, most=5) for seed in range(400)]
    assert {fault.kind for table in tables for fault in table} == set(MISFORTUNES)
    gone = [{f.worker for f in table if f.kind == "crash" and f.restart_after is None} for table in tables]
    assert 0 <= sum(len(workers) == 2 for workers in gone) <= 8


def row(**keys: object) -> str:
    text = "[[fault]]\n"
    for key, value in keys.items():
        text += f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n"
    return text


CASES = {
    "not TOML": ("[[fault]\n", "cannot be read as TOML"),
    "another table": ("[random]\nseed = 1\n", "'random' is no part of a fault table: it holds [[fault]] rows alone"),
    "single brackets": ('[fault]\nkind = "crash"\n', "head each with [[fault]], in double brackets"),
    "a list of no rows": ("fault = [1]\n", "head each with [[fault]], in double brackets"),
    "no kind": (row(at=1, worker=0), "fault 1 has no kind"),
    "no time": (row(kind="crash", worker=0), "fault 1 has no at"),
    "unknown kind": (row(kind="crush", at=1, worker=0), "fault 1: unknown kind 'crush': did you mean 'crash'"),
    "a kind that is no word": (row(kind=3, at=1, worker=0), "unknown kind '3'"),
    "unknown key": (row(kind="pause", at=1, worker=0, last=3), "unknown key 'last': did you mean 'lasts'"),
    "a key of another kind": (row(kind="crash", at=1, worker=0, factor=2), "fault 1 (crash): a crash has no factor"),
    "no such worker": (row(kind="crash", at=1, worker=3), "fault 1 (crash): no worker 3, there are 0 to 2"),
    "a worker below zero": (row(kind="crash", at=1, worker=-1), "no worker -1"),
    "a worker that is a truth": (row(kind="crash", at=1, worker=True), "worker = True is not a worker's number"),
    "a worker in words": (row(kind="crash", at=1, worker="1"), "worker = '1' is not a worker's number"),
    "a worker with a fraction": (row(kind="crash", at=1, worker=1.0), "worker = 1.0 is not a worker's number"),
    "no worker": (row(kind="crash", at=1), "fault 1 (crash) has no worker: say which one it hits, there are 0 to 2"),
    "a worker for the server": (row(kind="server", at=1, worker=0), "it hits the server: leave worker out"),
    "before zero": (row(kind="crash", at=-1, worker=0), "at = -1 is before zero"),
    "never": ("[[fault]]\nkind = 'crash'\nat = inf\nworker = 0\n", "at = inf is not a time"),
    "not a number": ("[[fault]]\nkind = 'crash'\nat = nan\nworker = 0\n", "at = nan is not a time"),
    "a time that is a truth": (row(kind="crash", at=True, worker=0), "at = True is not a time"),
    "a time without a unit": (row(kind="crash", at="3", worker=0), "at = '3' has the unknown unit ''"),
    "a time in words": (row(kind="crash", at="soon", worker=0), "at = 'soon' is not a time"),
    "a time too large": (row(kind="crash", at=10**400, worker=0), "at = inf is not a time"),
    "no duration": (row(kind="cut", at=1, worker=0), "fault 1 (cut) has no lasts: a cut needs lasts"),
    "no factor": (row(kind="slow", at=1, worker=0, lasts=1), "has no factor: a slow needs lasts and factor"),
    "a duration of nothing": (row(kind="pause", at=1, worker=0, lasts=0), "lasts = 0 does nothing"),
    "a negative duration": (row(kind="reorder", at=1, worker=0, lasts=-2), "lasts = -2 is before zero"),
    "a restart in the past": (row(kind="crash", at=1, worker=0, restart_after=-1), "restart_after = -1 is before zero"),
    "a notice that is a list": (row(kind="cut", at=1, worker=0, lasts=1, noticed_after=[1]), "[1] is not a time"),
    "factor zero": (row(kind="slow", at=1, worker=0, lasts=1, factor=0), "factor = 0.0 is no number above 0"),
    "factor a truth": (row(kind="slow", at=1, worker=0, lasts=1, factor=True), "factor = True is no number above 0"),
    "factor a word": (row(kind="slow", at=1, worker=0, lasts=1, factor="4"), "factor = '4' is no number above 0"),
    "unknown message": (row(kind="lose", at=1, worker=0, message="pull"), "unknown message 'pull'"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_line_that_names_file_and_row(name: str, tmp_path: Path) -> None:
    text, expected = CASES[name]
    with pytest.raises(UserError) as caught:
        read_faults(written(tmp_path, text), 3)
    message = str(caught.value)
    assert expected in message
    assert message.startswith(str(tmp_path / "faults.toml")) and "\n" not in message


def test_the_row_is_counted_as_in_the_file(tmp_path: Path) -> None:
    text = row(kind="crash", at=7, worker=0) + row(kind="crash", at=1, worker=9)
    with pytest.raises(UserError, match=r"fault 2 \(crash\): no worker 9"):
        read_faults(written(tmp_path, text), 3)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file nowhere\.toml: --faults takes a TOML file"):
        read_faults(Path("nowhere.toml"), 1)
    with pytest.raises(UserError, match=r"cannot be read as TOML: it is a folder"):
        read_faults(tmp_path, 1)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read as TOML"):
        read_faults(tmp_path / "bytes", 1)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("crush", 1.0, 0),
        Fault("crash", 1.0, 0, factor=2.0),
        Fault("pause", 1.0, 0),
        Fault("server", 1.0, 0),
        Fault("lose", 1.0),
        Fault("slow", 1.0, 0, lasts=1.0, factor=float("nan")),
        Fault("cut", float("nan"), 0, lasts=1.0),
    ],
)
def test_faults_that_were_made_by_hand_are_checked_alike(fault: Fault) -> None:
    with pytest.raises(UserError):
        check_faults([fault], 2)
