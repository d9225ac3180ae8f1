"""A run folder names code: one of another user or machine is opened for that only with --trust."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.runs.arrival_log import ArrivalLog
from paceline.runs.folder import RunFolder
from paceline.runs.recording import ScriptCall
from paceline.system.strict_json import SEAL, seal, to_json, unseal
from paceline.system.user_key import key_file

VERBS = {
    "resume": (),
    "replay": (),
    "landscape": (),
    "server": ("--resume",),
    "simulate": ("--workers", "2", "--speeds", "1,1", "--like"),
    "plan": ("--like",),
}


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A module that leaves a mark when it is imported."""
    path = tmp_path / "evil.py"
    path.write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\nraise SystemExit(7)")
    return path


@pytest.fixture
def foreign(tmp_path: Path, evil: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of somebody else, whose key is another one."""
    folder = started(tmp_path, task=f"{evil}:build")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config of another user"))
    return folder


def made(runs: Path, **settings: object) -> RunFolder:
    return RunFolder.create(RunConfig(**{"workers": 2, "name": "it", "runs": str(runs), **settings}))  # type: ignore[arg-type]


def started(runs: Path, **settings: object) -> RunFolder:
    """A run with an empty log, which 'resume' continues in this process."""
    folder = made(runs, strategy="classic", **settings, workers=1)
    ArrivalLog(folder.arrivals_file, folder.config()).close()
    return folder


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_code_of_another_user_is_not_imported(
    verb: str, foreign: RunFolder, evil: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, *VERBS[verb], str(foreign.path)]) == 2
    error = capsys.readouterr().err
    assert f"import task 'build' from {evil}" in error and "--trust" in error and "Traceback" not in error
    assert not (evil.parent / "imported").exists()


def test_with_trust_it_is_imported(tmp_path: Path, evil: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = started(tmp_path, task=f"{evil}:build")
    folder.owner_file.unlink()
    assert main(["resume", str(folder.path), "--trust"]) == 2
    assert "cannot be built: SystemExit: 7" in capsys.readouterr().err
    assert (evil.parent / "imported").exists()


def test_ones_own_folder_needs_no_trust_even_at_another_place(tmp_path: Path, evil: Path) -> None:
    folder = made(tmp_path, task=f"{evil}:build", track=["mine:Tracker"])
    RunFolder(folder.path.rename(tmp_path / "moved")).require_trust(trackers=True)


def test_a_signature_of_other_code_does_not_count(tmp_path: Path, evil: Path) -> None:
    folder = made(tmp_path, task="harmless:build")
    _, _, text = folder.config_file.read_text().partition("\n")  # without its checksum
    folder.config_file.write_text(text.replace("harmless:build", f"{evil}:build"))
    with pytest.raises(UserError, match="was not signed with your key"):
        folder.require_trust(trackers=False)


def test_a_folder_of_built_in_parts_needs_no_trust_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = made(tmp_path, track=["csv"])
    folder.require_trust(trackers=True)
    assert not key_file().exists() and not folder.owner_file.exists()


def test_a_tracker_counts_only_where_it_is_started(tmp_path: Path) -> None:
    folder = made(tmp_path, track=["mine:Tracker"])
    folder.owner_file.unlink()
    folder.require_trust(trackers=False)
    with pytest.raises(UserError, match="import tracker 'Tracker' from module mine, perhaps of "):
        folder.require_trust(trackers=True)


def test_a_script_that_was_exchanged_is_refused(tmp_path: Path, evil: Path) -> None:
    folder = made(tmp_path, task="script:loop")
    (tmp_path / "loop.py").touch()
    ScriptCall.of([str(tmp_path / "loop.py")]).save(folder)
    folder.require_trust(trackers=False)
    exchanged = unseal(folder.script_file.read_text().replace("loop.py", "evil.py").replace(SEAL, "other"))
    folder.script_file.write_text(to_json(seal(exchanged)))
    with pytest.raises(UserError, match=rf"run the script that script.json names, {evil}: add --trust"):
        folder.require_trust(trackers=False)


def test_control_characters_of_a_name_are_not_printed(tmp_path: Path) -> None:
    folder = made(tmp_path, track=["a\x1b[2J:B"])
    folder.owner_file.unlink()
    with pytest.raises(UserError, match=r"module a.x1b.2J") as error:
        folder.require_trust(trackers=True)
    assert "\x1b" not in str(error.value)


def test_a_home_that_cannot_be_written_trains_and_says_why_it_asks_for_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    folder = made(tmp_path, task="mine:build")
    assert not folder.owner_file.exists()
    with pytest.raises(UserError, match=r"cannot be compared with your key \(Not a directory\), and would import"):
        folder.require_trust(trackers=False)
