"""Two machines and one remote run: the second is refused as long as the first writes, and the first is fenced after."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.object_store import ownership
from paceline.object_store.download import fetch_run
from paceline.object_store.ownership import Fenced, claim, epochs_of, find_run
from paceline.object_store.process import MirrorLoop
from paceline.object_store.store import ObjectStore
from paceline.object_store.takeover import CopyState, require_idle, take_ownership
from paceline.object_store.upload import FolderUpload
from paceline.runs.folder import RunFolder
from tests.support.stores import TestStore, append, made_run, memory_url, silent, upload_of
from tests.support.waiting import until


@pytest.fixture
def store() -> TestStore:
    return TestStore(memory_url())


def elsewhere(store: TestStore, tmp_path: Path) -> RunFolder:
    """The run on another machine."""
    fetch_run(store, tmp_path / "other" / "it", silent)
    return RunFolder(tmp_path / "other" / "it")


def test_the_first_machine_is_fenced_once_another_has_taken_over(store: TestStore, tmp_path: Path) -> None:
    here = made_run(tmp_path)
    first = upload_of(here, store)
    first.sync()
    there = elsewhere(store, tmp_path)
    second = upload_of(there, store)
    append(here.arrivals_file, b"first machine")
    with pytest.raises(Fenced, match="has taken over memory://"):
        first.sync()
    append(there.arrivals_file, b"second machine")
    second.sync()
    with pytest.raises(Fenced):
        first.sync(ended=True)
    run = find_run(store)
    assert run is not None and run.writer.epoch == 2
    fetch_run(store, tmp_path / "third", silent)
    assert (tmp_path / "third/arrivals.log").read_bytes() == there.arrivals_file.read_bytes()


def test_a_late_write_of_the_first_machine_changes_nothing(
    store: TestStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped between its check and its write: all that it still writes and deletes is below its own prefix."""
    here = made_run(tmp_path)
    first = upload_of(here, store, part_nbytes=300)
    first.sync()
    there = elsewhere(store, tmp_path)
    upload_of(there, store, part_nbytes=300).sync()
    before = store.names("00000002")
    monkeypatch.setattr("paceline.object_store.upload.require_ownership", lambda *_: None)
    for _ in range(3):
        shutil.rmtree(here.checkpoints, ignore_errors=True)
        append(here.arrivals_file, b"first machine" * 50)
        first.sync()
    assert store.names("00000002") == before
    fetch_run(store, tmp_path / "third", silent)
    assert (tmp_path / "third/arrivals.log").read_bytes() == there.arrivals_file.read_bytes()


def test_the_copy_of_an_earlier_writer_is_deleted_once_there_is_a_newer_one(store: TestStore, tmp_path: Path) -> None:
    upload_of(made_run(tmp_path), store).sync()
    there = elsewhere(store, tmp_path)
    second = upload_of(there, store)
    assert any(name.startswith("00000001-") for name in store.names(""))
    second.sync()
    assert not any(name.startswith("00000001-") for name in store.names(""))
    assert epochs_of(store) == [2, 1]


def test_of_two_that_take_over_at_the_same_moment_one_is_refused(store: TestStore) -> None:
    claim(store, 1)
    with pytest.raises(UserError, match="taken over by another machine at the same moment"):
        claim(store, 1)


def test_a_store_without_conditional_writes_fences_the_first_of_two(
    store: TestStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwrite(self: ObjectStore, name: str, content: bytes) -> bool:
        self.put(name, content)
        return True

    monkeypatch.setattr(ObjectStore, "create", overwrite)
    here = made_run(tmp_path)
    first = FolderUpload(here.path, store, claim(store, 1))
    claim(store, 1)
    with pytest.raises(Fenced):
        first.sync()


def test_a_new_run_does_not_replace_one_of_its_name(store: TestStore, tmp_path: Path) -> None:
    upload_of(made_run(tmp_path / "a"), store).sync()
    with pytest.raises(UserError, match=r"exists already: choose another --name, or 'paceline resume memory://"):
        upload_of(made_run(tmp_path / "b"), store)


def test_an_older_folder_does_not_replace_what_another_machine_has_trained(store: TestStore, tmp_path: Path) -> None:
    here = made_run(tmp_path)
    upload_of(here, store).sync()
    upload_of(elsewhere(store, tmp_path), store)
    with pytest.raises(UserError, match=r"has gone on with memory://.*add --mirror none"):
        take_ownership(store, here.path)


def test_a_folder_of_this_machine_goes_on_after_a_crash_and_to_another_store(store: TestStore, tmp_path: Path) -> None:
    here = made_run(tmp_path)
    upload_of(here, store)  # killed before its first pass
    assert take_ownership(store, here.path).epoch == 2
    other = TestStore(memory_url())
    assert take_ownership(other, here.path).epoch == 1
    assert take_ownership(store, here.path).epoch == 3, "a copy elsewhere does not end this one"
    state = CopyState.load(here.path, other.url)
    assert state is not None and state.epoch == 1


def test_a_run_that_was_written_since_its_download_is_refused(store: TestStore, tmp_path: Path) -> None:
    here = made_run(tmp_path)
    first = upload_of(here, store)
    first.sync()
    there = elsewhere(store, tmp_path)
    append(here.arrivals_file, b"more")
    first.sync()
    with pytest.raises(UserError, match="still writes memory://"):
        take_ownership(store, there.path)


def test_a_run_that_is_being_written_is_not_taken_over(
    store: TestStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = made_run(tmp_path)
    first = upload_of(here, store)
    first.sync()
    require_idle(store, silent, seconds=0.02)

    def work(seconds: float) -> None:
        append(here.arrivals_file, b"more")
        first.sync()

    monkeypatch.setattr("paceline.object_store.takeover.time.sleep", work)
    with pytest.raises(UserError, match=r"is being written by .*--take-over"):
        require_idle(store, silent, seconds=60.0)
    first.sync(ended=True)
    require_idle(store, silent, seconds=60.0)  # it was closed: nothing to wait for


def test_damaged_state_and_owners_are_one_line(store: TestStore, tmp_path: Path) -> None:
    here = made_run(tmp_path)
    upload_of(here, store)
    (here.path / "mirror.json").write_text("{")
    with pytest.raises(UserError, match=r"mirror.json cannot be read .*: remove it"):
        take_ownership(store, here.path)
    store.put("owners/00000001.json", b'{"epoch": 1, "writer": "../../x", "host": "h"}')
    with pytest.raises(ownership.StoreFailed, match="names another owner"):
        find_run(store)


class Script:
    """What a loop waits for: calls one function after another, then orders the end."""

    def __init__(self, *steps: object) -> None:
        self.steps = list(steps)

    def __call__(self, seconds: float) -> str | None:
        if not self.steps:
            return "end"
        step = self.steps.pop(0)
        if isinstance(step, str):
            return step
        if callable(step):
            step()
        return None


def loop_of(upload: FolderUpload, store: TestStore) -> tuple[MirrorLoop, list[str]]:
    said: list[str] = []
    return MirrorLoop(upload, store.url, lambda row: said.append(str(row.get("text")))), said


def test_a_store_that_fails_is_named_once_and_once_more_when_it_is_back(store: TestStore, tmp_path: Path) -> None:
    here = made_run(tmp_path)
    loop, said = loop_of(upload_of(here, store), store)

    def fail() -> None:
        store.fail_from(0)
        append(here.arrivals_file, b"more")

    def back() -> None:
        store.before = lambda name: None

    assert loop.run(Script(None, fail, None, None, back, None, fail, back))
    assert [text.split(" (")[0].removeprefix(store.url) for text in said] == [
        " cannot be written",
        " works again: the copy is up to date",
        " cannot be written",
        " works again: the copy is up to date",
    ]
    run = find_run(store)
    assert run is not None and run.manifest.ended


def test_a_store_that_fails_to_the_end_is_given_up(
    store: TestStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.object_store.process.RETRY_SECONDS", 0.0)
    upload = upload_of(made_run(tmp_path), store)
    loop, said = loop_of(upload, store)
    store.fail_from(2)
    assert not loop.run(Script(None, None))
    assert sum("cannot be written" in text for text in said) == 1
    assert upload.state.nbytes > upload.state.done and upload.state.files


def test_a_store_that_does_not_answer_is_named_while_it_is_waited_for(
    store: TestStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.object_store.process.LAG_SECONDS", 0.0)
    monkeypatch.setattr("paceline.object_store.process.LOOK_SECONDS", 0.001)
    loop, said = loop_of(upload_of(made_run(tmp_path), store), store)
    store.before = lambda name: None if said else until(lambda: said, "a line about the lag")  # type: ignore[assignment]
    assert loop.run(Script(None, lambda: said.append("-")))
    assert "behind the run" in said[0] and "has caught up with the run" in said[1]


def test_a_fenced_loop_says_so_once_and_waits_for_the_end(store: TestStore, tmp_path: Path) -> None:
    here = made_run(tmp_path)
    loop, said = loop_of(upload_of(here, store), store)
    take_over = Script(None, lambda: claim(store, 2), lambda: append(here.arrivals_file, b"x"), None, None)
    assert loop.run(take_over)
    (text,) = said
    assert "has taken over" in text and "goes on here alone" in text and not take_over.steps


def test_a_run_that_never_started_leaves_nothing_in_the_store(store: TestStore, tmp_path: Path) -> None:
    loop, _ = loop_of(upload_of(made_run(tmp_path), store), store)
    assert loop.run(Script(None, "discard"))
    assert store.names("") == []
