"""Where the token and the certificate of a served run come from: given, made, or kept in its folder for later."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.runs.folder import RunFolder
from paceline.runtimes.sharded.processes import LOCAL
from paceline.transports.auth import MAKE_TOKEN, READ_ONLY, make_token, read_only, read_token, wants_tls, write_secret
from paceline.transports.connection import format_address, is_loopback, parse_address
from paceline.transports.tls import Tls, make_certificate, server_tls

LOOPBACK = "127.0.0.1:0"
STARTING_SECONDS, LOOK_SECONDS = 30.0, 0.05
PLAIN_WARNING = "--plain: pushes and weights travel unencrypted, and whoever is on the path can read and replace them"
Note = Callable[[str], None]


@dataclass(frozen=True)
class ListenOptions:
    """Where a server listens, and how workers authenticate."""

    listen: str | None = None
    token_file: str | None = None
    tls: bool | None = None  # None: as before if it is resumed, else unless only this machine can connect
    certificate: str | None = None
    key: str | None = None
    servers: int | None = None  # how many servers share the weights; None: one, or as many as before
    elsewhere: bool = False  # whether the other servers are started by the user, on other machines
    wait: float | None = None  # seconds that all workers have to join; None: no limit
    supervised: bool = False  # whether this command is started again: a signal then ends it, and not the run

    @property
    def num_servers(self) -> int:
        return 1 if self.servers is None else self.servers

    @property
    def address(self) -> str:
        return self.listen or LOOPBACK


@dataclass(frozen=True)
class Credentials:
    """What a server authenticates itself and its workers with."""

    token: bytes
    tls: Tls | None
    kept: dict[str, Any]  # what the folder keeps for a resume, and for workers of this machine


def make_credentials(options: ListenOptions, folder: RunFolder, note: Note) -> Credentials:
    """Read or make the token and, for TLS, the certificate. Both are kept in the run's folder."""
    token = _token(options, folder, note)
    if not wants_tls(options.tls, options.address):
        if not is_loopback(parse_address(options.address)[0]):
            note(PLAIN_WARNING)
        return Credentials(token, None, {"tls": False, "plain": options.tls is False})
    given = options.certificate is not None and options.key is not None
    files = Path(options.certificate or ""), Path(options.key or "")
    tls = server_tls(*(files if given else make_certificate(folder.path / "tls")))
    note(f"TLS: workers may check --fingerprint {tls.fingerprint}")
    kept = {"certificate": str(files[0].absolute()), "key": str(files[1].absolute())} if given else {}
    return Credentials(token, tls, {"tls": True, "fingerprint": tls.fingerprint, **kept})


def _token(options: ListenOptions, folder: RunFolder, note: Note) -> bytes:
    """The given token, else the run's earlier one, else a new one, which is shown if workers are on other machines."""
    before = read_token(folder.token_file, {}) if folder.token_file.exists() else None
    file = Path(options.token_file) if options.token_file is not None else None
    token = read_token(file, os.environ, MAKE_TOKEN) or before
    if token is None:
        token = make_token()
        if not is_loopback(parse_address(options.address)[0]):
            note(f"token for workers, shown once: {token.decode()} (kept in {folder.token_file})")
    elif token.startswith(READ_ONLY):
        raise UserError("this token is for observers, who only read: give the run's own, or none and one is made")
    if token != before:
        write_secret(folder.token_file, token + b"\n")
        write_secret(folder.read_token_file, read_only(token) + b"\n")
    return token


def as_before(options: ListenOptions, folder: RunFolder, note: Note) -> ListenOptions:
    """Fill in how a resumed run was served before: address, servers and TLS. Workers then find back by themselves."""
    before = folder.served()
    if options.listen is None:
        if "address" not in before:
            raise UserError(f"{folder.path} was not served before: say where with --listen HOST:PORT")
        options = dataclasses.replace(options, listen=str(before["address"]))
    if options.servers is None:
        options = dataclasses.replace(options, servers=1 + len(before.get("shards", ())))
    was_tls = before.get("tls")
    if options.tls is None and was_tls:
        files = (options.certificate or before.get("certificate"), options.key or before.get("key"))
        return dataclasses.replace(options, tls=True, certificate=files[0], key=files[1])
    if options.tls is None and before.get("plain"):
        return dataclasses.replace(options, tls=False)
    if was_tls is not None and was_tls != wants_tls(options.tls, options.address):
        was, now = ("over TLS", "--plain") if was_tls else ("without TLS", "over TLS")
        note(f"{folder.path} was served {was} before and is now served {now}: start its workers again the same way")
    return options


def server_of_run(path: Path) -> dict[str, Any]:
    """How a worker of the same machine reaches the server of a run, as fields of ConnectOptions.

    Wait for a server that is starting. Refuse a folder of another user: his server would tell this worker what to run.
    """
    folder = RunFolder.open(path)
    deadline = time.monotonic() + STARTING_SECONDS
    while "address" not in (served := folder.served()) and folder.is_locked() and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    if "address" not in served or not folder.token_file.exists():
        raise UserError(f"{path} is not served now: start 'paceline server', or 'paceline server --resume {path}'")
    for file in (folder.path, folder.server_file, folder.token_file):
        if (owner := file.stat().st_uid) not in (os.geteuid(), 0):
            what = f"{file} belongs to user {owner}, whose server could run anything here"
            raise UserError(f"{what}: use --connect and --token-file if you trust it")
    host, port = parse_address(str(served["address"]))
    reach = {"connect": format_address((LOCAL.get(host, host), port)), "token_file": str(folder.token_file)}
    return {**reach, "tls": bool(served.get("tls")), "fingerprint": served.get("fingerprint")}
