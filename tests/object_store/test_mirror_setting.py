"""The setting `mirror`, its mistakes, and whom a run folder may send its files to."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.runs.arrival_log import ArrivalLog, fingerprint
from paceline.runs.folder import RunFolder
from paceline.settings import imports
from paceline.settings.imports import check_mirror, check_store
from paceline.settings.resolve import resolve


def test_a_url_of_runs_is_short_for_a_mirror() -> None:
    config = RunConfig(runs="s3://bucket/experiments")
    assert (config.runs, config.mirror) == ("runs", "s3://bucket/experiments")
    assert RunConfig(runs="here", mirror="s3://b/x").runs == "here"
    with pytest.raises(UserError, match="give a local folder as --runs"):
        RunConfig(runs="s3://bucket/x", mirror="s3://bucket/y")


def test_the_mirror_does_not_change_what_a_log_belongs_to() -> None:
    assert fingerprint(RunConfig()) == fingerprint(RunConfig(mirror="file:///x/y"))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("bucket/runs", "is not the URL of an object store"),
        ("file://", "is not the URL of an object store"),
        ("simplecache::file:///x", "is not the URL of an object store"),
        ("file:///x/*", "is not the URL of an object store"),
        ("sftp://me:secret@host/x", "with a password would be kept in config.toml"),
        ("memory://x", "ends with the process"),
    ],
)
def test_a_wrong_url_is_one_line(url: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as found:
        resolve(RunConfig(mirror=url))
    assert "secret" not in str(found.value)


@pytest.mark.parametrize(
    ("url", "install"), [("s3://b/x", "s3fs"), ("gs://b/x", "gcsfs"), ("abfs://b/x", "adlfs"), ("file:///x", "")]
)
def test_a_missing_package_is_named(url: str, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "is_installed", lambda name: False)
    with pytest.raises(UserError) as found:
        check_store(url)
    assert str(found.value).endswith(f"not installed: pip install 'paceline[store]'{' ' * bool(install)}{install}")
    monkeypatch.setattr(imports, "is_installed", lambda name: name == "fsspec")
    if install:
        with pytest.raises(UserError, match=f"needs the package {install}, which"):
            check_store(url)
    check_mirror("none")
    check_mirror(None)


def test_simulated_and_many_runs_are_not_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ["--runs", str(tmp_path), "--mirror", "file:///nowhere"]
    assert main(["simulate", "--workers", "2", "--timing-only", *runs]) == 2
    assert "simulate a run again instead of copying it" in capsys.readouterr().err
    (tmp_path / "sweep.toml").write_text('mirror = "file:///nowhere"\nstrategy = ["sync", "async"]\nsteps = 2\n')
    assert main(["sweep", str(tmp_path / "sweep.toml"), "--runs", str(tmp_path / "many")]) == 2
    assert "mirror" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--take-over",), ("--runs", "there")])
def test_flags_of_a_run_in_a_store_are_refused_for_a_folder(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(tmp_path), *arguments]) == 2
    assert "leave it out" in capsys.readouterr().err


def foreign_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of somebody else that names a store."""
    settings = RunConfig(
        strategy="classic", workers=1, name="it", runs=str(tmp_path), mirror=f"file://{tmp_path}/theirs"
    )
    folder = RunFolder.create(settings)
    ArrivalLog(folder.arrivals_file, folder.config()).close()
    folder.require_trust(trackers=True, mirror=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config of another user"))
    return folder


@pytest.mark.parametrize("verb", [("resume",), ("server", "--resume")])
def test_a_folder_of_somebody_else_sends_nothing_to_the_store_that_it_names(
    verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = foreign_run(tmp_path, monkeypatch)
    assert main([*verb, str(folder.path)]) == 2
    said = capsys.readouterr().err
    assert f"would copy the run to file://{tmp_path}/theirs: add --trust if you trust this" in said
    assert not (tmp_path / "theirs").exists()
    folder.require_trust(trackers=True)  # nothing is sent by verbs that only read


def test_replaying_a_run_in_a_store_needs_a_place_for_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "file:///nowhere/it", "--until", "3"]) == 2
    assert "add --output FILE" in capsys.readouterr().err
