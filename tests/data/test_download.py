"""`paceline data get` against a server of our own on the loopback: resume, refuse, retry, never half a file."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.data import cifar, download, sources
from paceline.data.datasets import DATASETS, load, locate
from paceline.data.download import get
from paceline.data.sources import DownloadSource, RemoteFile
from paceline.data.sst import zip_members
from paceline.errors import DataError, UserError
from tests.support.data_files import cifar_batches, idx_contents, tar_of, tree_files

FIRST = "train-images-idx3-ubyte.gz"


class Server(ThreadingHTTPServer):
    """Serves `files`; its switches make it misbehave."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.ignores_range = False
        self.breaks_after: list[int] = []  # bytes sent before the connection drops, one a request
        self.failures: list[int] = []  # status codes, one a request
        self.is_endless = False  # sends no length, and more as long as somebody reads

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name, asked = self.path.rpartition("/")[2], self.headers.get("Range")
        self.server.requests.append((name, asked))
        if self.server.failures:
            return self.send_error(self.server.failures.pop(0))
        if name not in self.server.files:
            return self.send_error(404)
        content = self.server.files[name]
        start = 0 if asked is None or self.server.ignores_range else int(asked[len("bytes=") : -1])
        if start and start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if not self.server.is_endless:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        while self.server.is_endless:
            try:
                self.wfile.write(bytes(1 << 16))
            except OSError:
                return None
        stop = start + self.server.breaks_after.pop(0) if self.server.breaks_after else len(content)
        self.wfile.write(content[start:stop])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(download, "BACK_OFF_SECONDS", 0.001)
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 5.0)
    contents = idx_contents()
    files = tuple(RemoteFile(f"{name}.gz", {name: hashlib.sha256(raw).hexdigest()}) for name, raw in contents.items())
    with Server() as running:
        running.files = {f"{name}.gz": gzip.compress(raw, mtime=0) for name, raw in contents.items()}
        monkeypatch.setitem(sources.SOURCES, "mnist", DownloadSource("http://127.0.0.1:9/nobody/", files))
        monkeypatch.setenv("PACELINE_MIRROR", running.url)
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield running
        running.shutdown()


def leave_part(folder: Path, content: bytes) -> None:
    folder.mkdir(parents=True)
    (folder / f"{FIRST}.part").write_bytes(content)


def test_fresh_then_already_present(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = get("mnist")
    assert folder == tmp_path / "xdg" / "paceline" / "mnist"
    assert sorted(path.name for path in folder.iterdir()) == sorted(server.files)
    assert locate("mnist", None).origin == "cache" and len(load(locate("mnist", None)).train_images) == 60
    assert len(server.requests) == 4
    capsys.readouterr()
    get("mnist")
    assert len(server.requests) == 4
    said = capsys.readouterr()
    assert said.err.count("already there") == 4 and said.out == ""


def test_repackaged_file_is_accepted(server: Server, tmp_path: Path) -> None:
    server.files[FIRST] = gzip.compress(gzip.decompress(server.files[FIRST]), compresslevel=1, mtime=77)
    get("mnist", tmp_path / "there", progress=False)


def test_mirror_argument_wins(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MIRROR", "http://127.0.0.1:9/")
    get("mnist", tmp_path / "there", mirror=server.url + "/", progress=False)


def test_resumes_by_range(server: Server, tmp_path: Path) -> None:
    leave_part(tmp_path / "there", server.files[FIRST][:1000])
    get("mnist", tmp_path / "there", progress=False)
    assert server.requests[0] == (FIRST, "bytes=1000-")
    assert (tmp_path / "there" / FIRST).read_bytes() == server.files[FIRST]


def test_part_that_is_already_whole(server: Server, tmp_path: Path) -> None:
    leave_part(tmp_path / "there", server.files[FIRST])
    get("mnist", tmp_path / "there", progress=False)
    assert len(server.requests) == 4 and (tmp_path / "there" / FIRST).read_bytes() == server.files[FIRST]


def test_part_longer_than_the_file(server: Server, tmp_path: Path) -> None:
    leave_part(tmp_path / "there", server.files[FIRST] + b"more")
    get("mnist", tmp_path / "there", progress=False)
    assert (tmp_path / "there" / FIRST).read_bytes() == server.files[FIRST]


def test_server_that_ignores_range(server: Server, tmp_path: Path) -> None:
    server.ignores_range = True
    leave_part(tmp_path / "there", b"x" * 1000)
    get("mnist", tmp_path / "there", progress=False)
    assert len(server.requests) == 4 and (tmp_path / "there" / FIRST).read_bytes() == server.files[FIRST]


def test_wrong_part_starts_over_once(server: Server, tmp_path: Path) -> None:
    leave_part(tmp_path / "there", b"x" * 1000)
    get("mnist", tmp_path / "there", progress=False)
    assert server.requests[:2] == [(FIRST, "bytes=1000-"), (FIRST, None)]
    assert (tmp_path / "there" / FIRST).read_bytes() == server.files[FIRST]


def test_broken_connection_is_resumed(server: Server, tmp_path: Path) -> None:
    server.breaks_after = [700, 900]
    get("mnist", tmp_path / "there", progress=False)
    assert server.requests[:3] == [(FIRST, None), (FIRST, "bytes=700-"), (FIRST, "bytes=1600-")]


def test_tries_are_bounded_and_the_part_is_kept(server: Server, tmp_path: Path) -> None:
    server.breaks_after = [100] * 3
    with pytest.raises(UserError, match=f"{server.url}/{FIRST} could not be fetched: the connection ended after 300"):
        get("mnist", tmp_path / "there", progress=False)
    assert [path.name for path in (tmp_path / "there").iterdir()] == [f"{FIRST}.part"]
    get("mnist", tmp_path / "there", progress=False)
    assert server.requests[3] == (FIRST, "bytes=300-")


@pytest.mark.parametrize("damage", ["content", "gzip", "html"])
def test_wrong_content_is_not_kept(server: Server, tmp_path: Path, damage: str) -> None:
    whole = server.files[FIRST]
    server.files[FIRST] = {"content": gzip.compress(b"other"), "gzip": whole[:-9], "html": b"<html>sign in</html>"}[
        damage
    ]
    with pytest.raises(DataError, match=f"{FIRST}.*expected the official content.*another mirror") as caught:
        get("mnist", tmp_path / "there", progress=False)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "there").iterdir()) == [] and len(server.requests) == 1


def test_wrong_file_in_place_is_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / FIRST).write_bytes(b"rubbish")
    get("mnist", tmp_path / "there", progress=False)
    assert (tmp_path / "there" / FIRST).read_bytes() == server.files[FIRST]


def test_missing_on_the_server(server: Server, tmp_path: Path) -> None:
    del server.files[FIRST]
    with pytest.raises(UserError, match=f"{server.url}/{FIRST} could not be fetched: HTTP status 404") as caught:
        get("mnist", tmp_path / "there", progress=False)
    assert len(server.requests) == 1 and "\n" not in str(caught.value)


def test_busy_server_is_tried_again(server: Server, tmp_path: Path) -> None:
    server.failures = [503, 429]
    get("mnist", tmp_path / "there", progress=False)
    assert len(server.requests) == 6


def test_nobody_listens(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"http://127.0.0.1:9/.*could not be fetched"):
        get("mnist", tmp_path / "there", mirror="http://127.0.0.1:9", progress=False)
    with pytest.raises(UserError, match="only http and https"):
        get("mnist", tmp_path / "there", mirror="file:///etc", progress=False)


def test_disk_that_is_full(server: Server, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / f"{FIRST}.part").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"cannot be written.*No space left"):
        get("mnist", tmp_path / "there", progress=False)
    assert len(server.requests) == 1


def test_folder_that_cannot_be_made(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        get("mnist", tmp_path / "file" / "there", progress=False)


@pytest.mark.parametrize("is_endless", [False, True])
def test_a_file_that_is_too_large_is_neither_fetched_nor_kept(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_endless: bool
) -> None:
    monkeypatch.setitem(download.DATASETS, "mnist", replace(DATASETS["mnist"], download_nbytes=100_000))
    server.is_endless, server.files[FIRST] = is_endless, bytes(1_000_000)
    with pytest.raises(UserError, match=r"has more than 200000 bytes, .* try another mirror"):
        get("mnist", tmp_path / "there", progress=False)
    assert len(server.requests) == 1 and not list((tmp_path / "there").iterdir())


def test_a_gzip_bomb_is_not_unpacked(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_MAX_CONTENT_NBYTES", 1 << 20)
    server.files[FIRST] = gzip.compress(bytes(1 << 24))
    with pytest.raises(DataError, match="it unpacks to more than 1048576 bytes"):
        get("mnist", tmp_path / "there", progress=False)
    assert not list((tmp_path / "there").iterdir())


def test_a_tar_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a member that nobody asked for, and in the padding after the last one."""
    monkeypatch.setattr(cifar, "_MAX_ARCHIVE_NBYTES", 1 << 20)
    for content in (tar_of({"readme.html": bytes(1 << 22)}, "gz"), tar_of({}, "gz") + gzip.compress(bytes(1 << 22))):
        (tmp_path / "bomb.tar.gz").write_bytes(content)
        with pytest.raises(tarfile.ReadError, match="it unpacks to more than"):
            list(cifar.tar_members(tmp_path / "bomb.tar.gz", ".gz"))


def test_a_link_in_a_tar_is_not_followed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "links.tar", "w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            entry = tarfile.TarInfo("../data_batch_1")
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry)
    assert list(cifar.tar_members(tmp_path / "links.tar", ".tar")) == []


@pytest.mark.parametrize(("times", "way"), [(2, zipfile.ZIP_DEFLATED), (1, zipfile.ZIP_BZIP2)])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_zip_that_could_unpack_to_any_size_is_refused(tmp_path: Path, times: int, way: int) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", way) as archive:
        for _ in range(times):
            archive.writestr("trees/train.txt", bytes(100))
    with pytest.raises(zipfile.BadZipFile, match=r"train.txt is there twice, or packed in another way"):
        list(zip_members(tmp_path / "bomb.zip"))


def test_archive_is_checked_by_its_members(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = cifar_batches()
    checksums = {name: hashlib.sha256(content).hexdigest() for name, content in members.items()}
    file = RemoteFile("cifar-10-python.tar.gz", checksums)
    monkeypatch.setitem(sources.SOURCES, "cifar10", DownloadSource("http://127.0.0.1:9/", (file,)))
    server.files[file.name] = tar_of(members | {"readme.html": b"hello"}, "gz")
    get("cifar10", progress=False)
    assert len(load(locate("cifar10", None)).train_images) == 50
    server.files[file.name] = tar_of(members | {"data_batch_2": b"other"}, "gz")
    with pytest.raises(DataError, match="data_batch_2"):
        get("cifar10", tmp_path / "there", progress=False)


def test_sentences_are_fetched_checked_and_found(server: Server, tmp_path: Path) -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in tree_files().items():
            archive.writestr(f"trees/{name}", content)
    server.files["trainDevTestTrees_PTB.zip"] = target.getvalue()
    with pytest.raises(DataError, match=r"expected the official content, found sha256 .* of train.txt instead of"):
        get("sst5", tmp_path / "there", progress=False)
    checksums = {name: hashlib.sha256(content).hexdigest() for name, content in tree_files().items()}
    file = RemoteFile("trainDevTestTrees_PTB.zip", checksums)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sources.SOURCES, "sst5", DownloadSource("http://127.0.0.1:9/", (file,)))
        assert get("sst5", progress=False) == tmp_path / "xdg" / "paceline" / "sst5"
    found = locate("sst5", None)
    assert found.origin == "cache" and load(found).train_images.shape == (8_544, 64)


def test_names() -> None:
    with pytest.raises(UserError, match="unknown dataset"):
        get("imagnet")
    with pytest.raises(DataError, match=r"imagenet cannot be fetched.*--data-dir"):
        get("imagenet")
    assert (get("fashion-mnist-sample") / "LICENSE").is_file()
