"""Where token and certificate of a served run come from, and that a resumed server keeps both."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runs.folder import RunFolder
from paceline.runtimes.cluster import worker
from paceline.runtimes.cluster.credentials import ListenOptions, as_before, make_credentials, server_of_run
from paceline.runtimes.cluster.join import join_server
from paceline.system.strict_json import to_json
from paceline.transports.auth import ConnectOptions, make_token, read_only, tls_of, write_secret
from paceline.transports.handshake import TlsExpected
from paceline.transports.tls import make_certificate

HERE, ANYWHERE = "127.0.0.1:0", "0.0.0.0:0"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    return RunFolder.create(RunConfig(strategy="async", workers=2, name="it"))


class Run:
    """One run that is served several times; every time tells what it noted, and leaves its row in the folder."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def serve(self, **options: Any) -> tuple[ListenOptions, bytes, list[str]]:
        notes: list[str] = []
        asked = ListenOptions(**options)
        if self.folder.server_file.exists():
            asked = as_before(asked, self.folder, notes.append)
        own = make_credentials(asked, self.folder, notes.append)
        assert (own.tls is not None) == own.kept["tls"]
        row = {"address": asked.address.replace(":0", ":7000"), "by_hand": True, **own.kept}
        self.folder.server_file.write_text(to_json(row))
        return dataclasses.replace(asked, tls=own.kept["tls"]), own.token, notes


@pytest.mark.parametrize("listen", [HERE, ANYWHERE])
def test_every_server_has_a_token_that_only_its_user_can_read(folder: RunFolder, listen: str) -> None:
    _, token, notes = Run(folder).serve(listen=listen)
    assert folder.token_file.read_bytes().strip() == token and len(token) == 32
    assert folder.read_token_file.read_bytes().strip() == read_only(token)
    for file in (folder.token_file, folder.read_token_file):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert any("shown once" in note for note in notes) == (listen == ANYWHERE)


def test_a_given_token_is_kept_for_workers_here_and_for_a_resume(folder: RunFolder, tmp_path: Path) -> None:
    write_secret(tmp_path / "mine", b"a token of my own, long enough")
    run = Run(folder)
    _, first, _ = run.serve(token_file=str(tmp_path / "mine"))
    _, again, _ = run.serve()
    assert first == again == b"a token of my own, long enough"


def test_a_server_does_not_begin_with_the_token_of_observers(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", read_only(make_token()).decode())
    with pytest.raises(UserError, match="this token is for observers"):
        Run(folder).serve()


@pytest.mark.parametrize(
    ("options", "encrypted", "warned"),
    [
        ({"listen": ANYWHERE}, True, False),
        ({"listen": ANYWHERE, "tls": False}, False, True),
        ({"listen": HERE}, False, False),
        ({"listen": HERE, "tls": True}, True, False),
        ({"listen": HERE, "tls": False}, False, False),
    ],
)
def test_what_leaves_the_machine_is_encrypted_by_default(
    folder: RunFolder, options: dict[str, Any], encrypted: bool, warned: bool
) -> None:
    used, _, notes = Run(folder).serve(**options)
    assert (used.tls, any(note.startswith("--plain: pushes and weights travel") for note in notes)) == (
        encrypted,
        warned,
    )


@pytest.mark.parametrize(
    ("first", "again", "encrypted", "said"),
    [
        ({"listen": HERE, "tls": True}, {}, True, None),
        ({"listen": ANYWHERE}, {}, True, None),
        ({"listen": ANYWHERE, "tls": False}, {}, False, None),
        ({"listen": HERE}, {}, False, None),
        ({"listen": HERE}, {"listen": ANYWHERE}, True, "was served without TLS before and is now served over TLS"),
        ({"listen": ANYWHERE}, {"tls": False}, False, "was served over TLS before and is now served --plain"),
        ({"listen": HERE}, {"tls": True}, True, "was served without TLS before and is now served over TLS"),
    ],
)
def test_a_resumed_server_keeps_tls_as_it_was_unless_it_is_told_otherwise(
    folder: RunFolder, first: dict[str, Any], again: dict[str, Any], encrypted: bool, said: str | None
) -> None:
    run = Run(folder)
    _, token, _ = run.serve(**first)
    certificate = folder.served().get("fingerprint")
    used, same, notes = run.serve(**again)
    assert (used.tls, same) == (encrypted, token)
    assert any(said in note for note in notes) if said is not None else not any("before" in note for note in notes)
    if certificate is not None and encrypted:
        assert folder.served()["fingerprint"] == certificate


def test_a_resumed_server_keeps_a_certificate_of_ones_own(folder: RunFolder, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path / "mine")
    run, names = Run(folder), {"certificate": os.path.relpath(certificate), "key": os.path.relpath(key)}
    run.serve(tls=True, **names)
    shown = folder.served()["fingerprint"]
    used, _, _ = run.serve()
    assert (used.certificate, used.key, folder.served()["fingerprint"]) == (str(certificate), str(key), shown)
    key.unlink()
    with pytest.raises(UserError, match="are not a certificate and its key"):
        run.serve()


def test_without_openssl_the_default_is_one_clear_line(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="the command openssl is not here: install it, or give your own certificate"):
        Run(folder).serve(listen=ANYWHERE)


def test_a_start_that_fails_leaves_no_folder_behind(folder: RunFolder) -> None:
    Run(folder).serve(listen=ANYWHERE)
    folder.server_file.unlink()
    folder.discard_unstarted()
    assert not folder.path.exists()


@pytest.mark.parametrize("tls", [True, False])
def test_a_worker_of_the_same_machine_finds_everything_in_the_folder(folder: RunFolder, tls: bool) -> None:
    Run(folder).serve(listen=ANYWHERE, tls=tls)
    found = ConnectOptions(**server_of_run(folder.path))
    assert (found.connect, found.token_file) == ("127.0.0.1:7000", str(folder.token_file))
    used = tls_of(found)
    assert (used.fingerprint if used is not None else None) == folder.served().get("fingerprint")
    assert (used is not None) == tls


def test_a_worker_obeys_no_server_of_another_user(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="is not served now: start 'paceline server'"):
        server_of_run(folder.path)
    Run(folder).serve()
    monkeypatch.setattr(os, "geteuid", lambda: folder.path.stat().st_uid + 1)
    if folder.path.stat().st_uid == 0:  # root's folders are trusted
        os.chown(folder.token_file, 7, 7)
    with pytest.raises(UserError, match=r"belongs to user \d+, whose server could run anything here"):
        server_of_run(folder.path)


CASES = {
    ("worker",): "either of two is needed: --run RUN for a server on this machine",
    ("worker", "--run", "runs/it", "--connect", "127.0.0.1:7000"): "one of two is needed",
    ("worker", "--connect", "127.0.0.1:7000"): "no token for 127.0.0.1:7000: give RUN/token by --token-file",
    ("worker", "--run", "runs/it", "--tls", "--plain"): "--tls encrypts and --plain does not: leave one out",
    ("worker", "--run", "runs/it", "--plain"): "--plain, but runs/it is served over TLS: leave it out",
    ("server", "--key", "k", "--certificate", "c", "--plain"): "--certificate encrypts and --plain does not",
    ("status", "127.0.0.1:7000", "--fingerprint", "x", "--plain"): "--fingerprint encrypts and --plain does not",
    ("status", "runs/it", "--plain"): "runs/it is a folder: --token-file, --tls, --plain",
    ("train", "--plain"): "--plain is about workers on other machines: add --hosts FILE",
    ("resume", "runs/it"): "runs/it was served to workers that connect, and they would not find it: 'paceline server "
    "--resume runs/it' continues it",
}


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_each_mistake_has_its_line(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    Run(folder).serve(tls=True)
    assert main(list(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paceline: {CASES[words]}")
    assert not folder.arrivals_file.exists(), "nothing was trained"


@pytest.mark.parametrize("tls", [None, False])
def test_a_worker_on_loopback_takes_up_tls_by_itself_unless_told_not_to(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, tls: bool | None
) -> None:
    """The server of other machines speaks TLS on loopback too."""
    Run(folder).serve()
    tried = []

    def work(server: worker.ServerAddress, *_: object) -> bool:
        tried.append(server.tls is not None)
        if server.tls is None:
            raise TlsExpected("it speaks TLS")
        return True

    monkeypatch.setattr(worker, "work", work)
    options = ConnectOptions("127.0.0.1:7000", str(folder.token_file), tls)
    if tls is None:
        assert join_server(options, Console(quiet=True)) and tried == [False, True]
    else:
        with pytest.raises(TlsExpected):
            join_server(options, Console(quiet=True))


def test_a_server_that_cannot_listen_prints_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    with socket.create_server(("0.0.0.0", 0)) as other:
        words = ["--strategy", "async", "--workers", "1", "--dataset", "fashion-mnist-sample", "--steps", "1"]
        assert main(["server", *words, "--listen", f"0.0.0.0:{other.getsockname()[1]}", "--plain"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "another program listens there" in line and not list(tmp_path.glob("runs/*"))


def test_a_server_with_a_short_token_is_told_how_to_make_one(folder: RunFolder) -> None:
    write_secret(folder.path / "short", b"short\n")
    with pytest.raises(UserError, match=r"has 5 bytes, and needs 16: 'openssl rand -hex 16' makes one"):
        Run(folder).serve(listen=HERE, token_file=str(folder.path / "short"))
