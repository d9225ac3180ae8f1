"""Run folders: folders of an older schema are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.analysis.listing import runs_in
from paceline.cli.main import main
from paceline.config import SCHEMA, RunConfig
from paceline.errors import UserError
from paceline.runs.arrival_log import next_incarnation
from paceline.runs.folder import RunFolder
from tests.support.recorded_runs import small_config


@pytest.fixture
def old_folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(RunConfig(runs=str(tmp_path), name="old", rule="foresight"))
    text = folder.config_file.read_text()
    assert f"schema = {SCHEMA}\n" in text
    folder.config_file.write_text(text.replace(f"schema = {SCHEMA}\n", f"schema = {SCHEMA - 1}\n"))
    return folder


def test_a_folder_of_this_schema_is_read(tmp_path: Path) -> None:
    folder = RunFolder.create(RunConfig(runs=str(tmp_path), name="new", rule="foresight"))
    assert RunFolder.open(folder.path).config().rule == "foresight"


def test_an_older_folder_is_refused_in_one_line(old_folder: RunFolder) -> None:
    with pytest.raises(
        UserError, match=rf"has schema {SCHEMA - 1}, this version reads {SCHEMA}, .* train again"
    ) as error:
        old_folder.config()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("verb", ["resume", "replay", "status", "trace"])
def test_every_verb_that_reads_a_folder_refuses_an_older_one(
    verb: str, old_folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(old_folder.path)]) == 2
    output = capsys.readouterr()
    assert f"schema {SCHEMA - 1}" in output.err and "Traceback" not in output.err


def test_an_older_config_does_not_start_a_new_run(old_folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Its `rule = "foresight"` means another rule today."""
    assert main(["train", str(old_folder.config_file), "--runs", str(old_folder.path.parent)]) == 2
    assert f"schema {SCHEMA - 1}" in capsys.readouterr().err


def test_a_listing_names_the_problem_and_goes_on(old_folder: RunFolder) -> None:
    (row,) = runs_in(old_folder.path.parent)
    assert row["status"] == "damaged" and f"schema {SCHEMA - 1}" in row["problem"]


@pytest.mark.parametrize("verb", [["resume"], ["server", "--resume"]])
def test_a_run_that_was_killed_before_its_first_step_is_started_again(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(small_config(tmp_path, strategy="async", workers=2))
    assert main([*verb, str(folder.path)]) == 2
    error = capsys.readouterr().err
    assert "nothing was trained" in error and "start the run again with the same command" in error
    assert len(error.strip().splitlines()) == 1
    folder.checkpoints.mkdir()
    with pytest.raises(UserError, match=r"arrivals.log does not exist"):  # it is lost
        next_incarnation(folder.arrivals_file, folder.config())
    folder.require_unfinished()
