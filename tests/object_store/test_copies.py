"""A run folder in a store and back: what is in the store is at any time a run that can be resumed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from paceline.errors import StoreFailed, UserError
from paceline.object_store.download import fetch_run
from paceline.object_store.manifest import Manifest, Part
from paceline.object_store.ownership import find_run
from paceline.system.strict_json import seal, to_json
from tests.support.stores import TestStore, add_checkpoint, append, contents, made_run, memory_url, silent, upload_of

LEFT_HERE = {"token", "tls/key.pem", ".config.toml.1.tmp", "metrics.csv", "mirror.json"}


def fetched(store: TestStore, tmp_path: Path, name: str = "there") -> dict[str, bytes]:
    shutil.rmtree(tmp_path / name, ignore_errors=True)
    fetch_run(store, tmp_path / name, silent)
    found = contents(tmp_path / name)
    del found["mirror.json"]
    return found


def copied(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(folder).items() if name not in LEFT_HERE}


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_copy_has_every_file_but_secrets_and_what_can_be_made_again(kind: str, tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    store = TestStore(memory_url() if kind == "memory" else f"file://{tmp_path}/remote/it")
    assert upload_of(folder, store, part_nbytes=300).sync()
    assert fetched(store, tmp_path) == copied(folder.path)
    assert not any(b"secret" in store.get(name, 1 << 20) for name in store.names(""))
    assert not list(tmp_path.glob(".*")), "no unfinished download is left"


def test_a_growing_log_is_uploaded_in_pieces_of_its_new_bytes(tmp_path: Path) -> None:
    folder, store = made_run(tmp_path), TestStore(memory_url())
    upload = upload_of(folder, store, part_nbytes=4096)
    upload.sync()
    before, total = store.nbytes, 0
    for number in range(200):
        append(folder.arrivals_file, os.urandom(100 + number % 7))
        total += 100 + number % 7
        upload.sync()
    manifests = store.nbytes - before - sum(map(len, store_parts(store, "arrivals.log")))
    run = find_run(store)
    assert run is not None
    parts = run.manifest.files["arrivals.log"]
    assert sum(part.nbytes for part in parts) == folder.arrivals_file.stat().st_size
    assert len(parts) <= 12, "small pieces are joined"
    assert store.largest <= 4096 + 100
    assert manifests > 0 and store.nbytes - before < 200 * 2500 + 8 * total, "each byte is uploaded a few times at most"
    assert len(store_parts(store, "arrivals.log")) <= 2 * len(parts) + 2, "joined pieces are deleted"
    assert fetched(store, tmp_path) == copied(folder.path)


def store_parts(store: TestStore, file: str) -> list[bytes]:
    return [store.get(name, 1 << 20) for name in store.names("") if f"/files/{file}/" in name]


def test_a_log_that_a_recovery_has_cut_and_that_grew_again_is_copied_as_it_is(tmp_path: Path) -> None:
    folder, store = made_run(tmp_path), TestStore(memory_url())
    upload = upload_of(folder, store, part_nbytes=256)
    upload.sync()
    os.truncate(folder.arrivals_file, 500)
    append(folder.arrivals_file, b"other records" * 100)
    upload.sync()
    assert fetched(store, tmp_path) == copied(folder.path)


def test_what_is_in_the_store_is_consistent_after_every_single_put(tmp_path: Path) -> None:
    """The writer may be killed at any time: a reader finds the last whole pass, and no checkpoint beyond the log."""
    folder, store = made_run(tmp_path), TestStore(memory_url())
    upload = upload_of(folder, store, part_nbytes=300)
    upload.sync()
    states = [copied(folder.path)]
    seen: list[int] = []

    def look(name: str) -> None:
        found = fetched(store, tmp_path, "looked")
        seen.append(states.index(found))
        offsets = [json.loads(found[name])["log_offset"] for name in found if name.endswith("facts.json")]
        assert max(offsets) <= len(found["arrivals.log"])

    store.before = look
    for version in (8, 9, 10):
        append(folder.arrivals_file, os.urandom(360))
        append(folder.events_file, b"{}\n" * 50)
        add_checkpoint(folder, version)
        shutil.rmtree(folder.path / f"checkpoints/{version - 1:012d}")
        states.append(copied(folder.path))
        upload.sync()
        look("")
    assert seen == sorted(seen) and set(seen) == {0, 1, 2, 3}


def test_a_checkpoint_that_the_run_removes_during_its_upload_is_copied_whole(tmp_path: Path) -> None:
    folder, store = made_run(tmp_path), TestStore(memory_url())
    before = copied(folder.path)
    store.before = lambda name: shutil.rmtree(folder.checkpoints, ignore_errors=True)
    upload = upload_of(folder, store, part_nbytes=300)
    assert upload.sync()
    assert fetched(store, tmp_path) == before
    assert upload.sync()
    assert fetched(store, tmp_path) == copied(folder.path), "the next pass has what the folder has now"


@pytest.mark.parametrize("number", range(9))
def test_a_pass_that_fails_goes_on_from_where_it_was(number: int, tmp_path: Path) -> None:
    folder, store = made_run(tmp_path), TestStore(memory_url())
    upload = upload_of(folder, store, part_nbytes=300)
    store.fail_from(number)
    with pytest.raises(StoreFailed, match="no space"):
        upload.sync()
    store.before = lambda name: None
    puts = store.puts
    assert upload.sync()
    assert fetched(store, tmp_path) == copied(folder.path)
    names = [name for name in store.names("") if "/files/" in name]
    assert store.puts - puts <= len(names) - number + 3, "parts that are there are not uploaded again"


def test_a_store_that_deletes_nothing_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, store = made_run(tmp_path), TestStore(memory_url())
    upload = upload_of(folder, store)

    def refuse(name: str) -> None:
        raise StoreFailed("delete: forbidden")

    monkeypatch.setattr(store, "delete", refuse)
    for _ in range(4):
        append(folder.arrivals_file, b"x" * 36)
        assert upload.sync()
    assert upload.not_deleted == "delete: forbidden"
    assert fetched(store, tmp_path) == copied(folder.path)


@pytest.mark.parametrize("how", ["changed", "missing", "shorter"])
def test_a_damaged_object_is_named_in_one_line(how: str, tmp_path: Path) -> None:
    folder, store = made_run(tmp_path), TestStore(memory_url())
    upload_of(folder, store).sync()
    (name,) = (name for name in store.names("") if "/files/arrivals.log/" in name)
    content = store.get(name, 1 << 20)
    if how == "missing":
        store.delete(name)
    else:
        store.put(name, content[:-1] if how == "shorter" else b"X" + content[1:])
    with pytest.raises(UserError, match=r"memory://\S+ is damaged: .*arrivals.log") as found:
        fetch_run(store, tmp_path / "there", silent)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "there").exists() and not list(tmp_path.glob(".*"))


def test_a_damaged_checkpoint_is_left_out_for_an_older_one(tmp_path: Path) -> None:
    folder, store = made_run(tmp_path), TestStore(memory_url())
    add_checkpoint(folder, 8)
    upload_of(folder, store).sync()
    (name,) = (name for name in store.names("") if "000000000008/tensors" in name)
    store.put(name, b"broken")
    rows: list[dict[str, object]] = []
    fetch_run(store, tmp_path / "there", rows.append)
    assert sorted(path.name for path in (tmp_path / "there/checkpoints").iterdir()) == ["000000000007"]
    (note,) = (row["text"] for row in rows if row["kind"] == "note")
    assert "an older checkpoint is used" in str(note)


def test_a_damaged_manifest_gives_way_to_the_one_before(tmp_path: Path) -> None:
    folder, store = made_run(tmp_path), TestStore(memory_url())
    upload = upload_of(folder, store)
    upload.sync()
    before = copied(folder.path)
    append(folder.arrivals_file, b"x" * 36)
    upload.sync()
    manifests = [name for name in store.names("") if "/manifests/" in name]
    store.put(manifests[-1], store.get(manifests[-1], 1 << 20)[:-20])
    assert fetched(store, tmp_path) == before
    for name in manifests:
        store.put(name, b"{}")
    with pytest.raises(UserError, match="the remote run is damaged"):
        fetch_run(store, tmp_path / "other", silent)


@pytest.mark.parametrize(
    "name",
    ["../it/x", "/etc/passwd", ".bashrc", "a/../../x", "token", "tls/key.pem", "mirror.json", "a/b/c/d/e", "", "a\nb"],
)
def test_a_manifest_of_somebody_else_names_no_file_outside_of_the_folder(name: str) -> None:
    hostile = {"format": 1, "generation": 0, "ended": False, "files": {name: [[1, "0" * 64]]}}
    with pytest.raises(ValueError, match="which no run has"):
        Manifest.from_bytes(to_json(seal(hostile)).encode())


@pytest.mark.parametrize(
    "rows", [None, [1], [[1]], [[-1, "0" * 64]], [[1, "../x"]], [["1", "0" * 64]], [[1, "0" * 64, 2]]]
)
def test_a_manifest_with_odd_parts_is_refused(rows: object) -> None:
    hostile = {"format": 1, "generation": 0, "ended": False, "files": {"config.toml": rows}}
    with pytest.raises(ValueError, match="part"):
        Manifest.from_bytes(to_json(seal(hostile)).encode())


def test_a_manifest_reads_what_it_writes() -> None:
    parts = (Part(0, 3, "a" * 64), Part(3, 5, "b" * 64))
    manifest = Manifest(12, {"arrivals.log": parts, "owner": ()}, ended=True)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_a_url_without_a_run_and_a_disk_without_room_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="holds no run: give the URL of one"):
        fetch_run(TestStore(memory_url()), tmp_path / "there", silent)
    store = TestStore(memory_url())
    upload_of(made_run(tmp_path), store).sync()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(UserError, match="has room for 0 MB"):
        fetch_run(store, tmp_path / "there", silent)
