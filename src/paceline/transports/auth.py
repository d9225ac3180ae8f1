"""Mutual authentication by token, before anything else is read: HMAC-SHA256 over fresh nonces, without any I/O."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ProtocolError, UserError
from paceline.system.cpu import cores
from paceline.transports.connection import ANYWHERE, is_loopback, parse_address
from paceline.transports.frames import MAGIC, VERSION
from paceline.transports.tls import Tls, worker_tls

TOKEN_VARIABLE = "PACELINE_TOKEN"
MIN_TOKEN_NBYTES = 16  # a recorded handshake lets its owner try guesses at leisure
MAKE_TOKEN = "'openssl rand -hex 16' makes one, or leave it to 'paceline server'"
COPY_TOKEN = "copy the one of the server, which keeps it in RUN/token and may have printed it"
READ_ONLY = b"paceline-read-"  # how the tokens of observers begin
_NONCE_NBYTES = 32
_CHALLENGE = struct.Struct("<4sB11x32s")
_ANSWER = struct.Struct("<4sB11x32s32s")
CHALLENGE_NBYTES, ANSWER_NBYTES, PROOF_NBYTES = _CHALLENGE.size, _ANSWER.size, 32
DENIAL = bytes(PROOF_NBYTES)
"""Sent instead of a proof, so that the worker can distinguish a wrong token from a broken connection."""


class OtherVersion(ProtocolError):
    """The other end has another protocol version: install the same version of Paceline on both."""


class WrongToken(ProtocolError):
    """The two ends have different tokens."""


def _proof(token: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes, binding: bytes) -> bytes:
    """Compute a proof of the token that is valid for this connection, role and certificate only."""
    return hmac.digest(token, b"paceline %d %s" % (VERSION, role) + server_nonce + client_nonce + binding, "sha256")


def _require_protocol(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise ProtocolError("bytes that are not a handshake")
    if version != VERSION:
        raise OtherVersion(f"protocol {version}, not {VERSION}")


class ServerHandshake:
    """The server's side of one handshake. `binding` identifies the connection (the server's certificate) on both sides.

    >>> server, worker = ServerHandshake(b"token"), ClientHandshake(b"token")
    >>> worker.check(server.check(worker.answer(server.challenge)))
    >>> ServerHandshake(b"token").check(ClientHandshake(b"guess").answer(ServerHandshake(b"token").challenge))
    Traceback (most recent call last):
    paceline.transports.auth.WrongToken: a wrong token
    """

    def __init__(self, token: bytes, binding: bytes = b"") -> None:
        self._token, self._binding = token, binding
        self.reads_only = False  # whether the client has proved the token of observers
        self._nonce = secrets.token_bytes(_NONCE_NBYTES)
        self.challenge = _CHALLENGE.pack(MAGIC, VERSION, self._nonce)

    def check(self, answer: bytes | bytearray) -> bytes:
        """Return the server's proof if the client's is right, of the run's token or of its observers' token."""
        magic, version, nonce, proof = _ANSWER.unpack(answer)
        _require_protocol(magic, version)
        for token in (self._token, read_only(self._token)):
            if hmac.compare_digest(proof, _proof(token, b"worker", self._nonce, nonce, self._binding)):
                self.reads_only = token is not self._token
                return _proof(token, b"server", self._nonce, nonce, self._binding)
        raise WrongToken("a wrong token")


class ClientHandshake:
    """The worker's side of one handshake."""

    def __init__(self, token: bytes, binding: bytes = b"") -> None:
        self._token, self._binding = token, binding
        self._nonce = secrets.token_bytes(_NONCE_NBYTES)
        self._expected = b""

    def answer(self, challenge: bytes | bytearray) -> bytes:
        """Prove the token to this server, on this connection only."""
        magic, version, nonce = _CHALLENGE.unpack(challenge)
        _require_protocol(magic, version)
        self._expected = _proof(self._token, b"server", nonce, self._nonce, self._binding)
        proof = _proof(self._token, b"worker", nonce, self._nonce, self._binding)
        return _ANSWER.pack(MAGIC, VERSION, self._nonce, proof)

    def check(self, proof: bytes | bytearray) -> None:
        """Raise WrongToken unless the server accepts the worker's token and proves that it has it too."""
        if proof == DENIAL:
            raise WrongToken("does not accept our token")
        if not self._expected or not hmac.compare_digest(bytes(proof), self._expected):
            raise WrongToken("does not know our token")


def make_token() -> bytes:
    """Create a token of letters, digits, `-` and `_`.

    >>> len(make_token())
    32
    """
    return secrets.token_urlsafe(24).encode()


def read_only(token: bytes) -> bytes:
    """Derive the token of observers, which lets nobody push or join. The run's token cannot be computed from it.

    >>> derived = read_only(b"the token of a run")
    >>> derived.decode()
    'paceline-read-b8df85c24e32b20fa3f8ad00e13a7e4a'
    >>> read_only(derived) == derived
    True
    """
    if token.startswith(READ_ONLY):
        return token
    return READ_ONLY + hmac.digest(token, b"paceline observers", "sha256").hex()[:32].encode()


def write_secret(file: Path, content: bytes) -> None:
    """Write a file that no other user can read at any moment. Readers see the old file or the new one."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(temporary, flags, 0o600), "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)


def read_token(file: Path | None, environ: Mapping[str, str], remedy: str = COPY_TOKEN) -> bytes | None:
    """Read the token from `file`, else from the variable PACELINE_TOKEN. Return None if there is neither.

    Refuse a file that any user of the machine can read, as ssh refuses such a key: every holder of the token can push
    into the run, and a warning would be overlooked. A group may share one. Surrounding white space is ignored. Refuse
    a token that could be guessed too, with the `remedy`: only a server may make another one.
    """
    if file is None:
        text = environ.get(TOKEN_VARIABLE)
        if text is not None and not text.strip():
            raise UserError(f"the variable {TOKEN_VARIABLE} is empty: put the token into it, or unset it")
        return _long_enough(os.fsencode(text.strip()), TOKEN_VARIABLE, remedy) if text is not None else None
    try:
        mode, token = file.stat().st_mode, file.read_bytes().strip()
    except OSError as error:
        raise UserError(f"token file {file} cannot be read ({error.strerror}): copy it from the server") from None
    if mode & 0o006:
        raise UserError(f"token file {file} can be read by every user (mode {mode & 0o777:o}): chmod 600 {file}")
    if not token:
        raise UserError(f"token file {file} is empty: write the token of the run into it")
    return _long_enough(token, str(file), remedy)


def _long_enough(token: bytes, where: str, remedy: str) -> bytes:
    if len(token) < MIN_TOKEN_NBYTES:
        has = f"{len(token)} byte{'s' if len(token) != 1 else ''}"
        raise UserError(f"the token in {where} has {has}, and needs {MIN_TOKEN_NBYTES}: {remedy}")
    return token


@dataclass(frozen=True)
class ConnectOptions:
    """How a worker reaches its server and authenticates, and the settings of its own machine."""

    connect: str
    token_file: str | None = None
    tls: bool | None = None  # None: unless the server is on this machine
    fingerprint: str | None = None
    ca: str | None = None
    patience: float = 300.0
    data_dir: str | None = None
    threads: int | None = None
    worker: int | None = None
    overlap: int = 0
    device: str = "cpu"
    script: str | None = None  # the file of the run's script on this machine
    weights: str | None = None  # this machine's copy of the file that the run begins from


def token_of(options: ConnectOptions) -> bytes:
    """Read the token from the file or the variable. Raise UserError, which says where it is, if there is neither."""
    token = read_token(Path(options.token_file) if options.token_file is not None else None, os.environ)
    if token is None:
        here = (
            "on the server's own machine the run's folder RUN in place of the address needs none (a worker: --run RUN)"
        )
        raise UserError(f"no token for {options.connect}: give RUN/token by --token-file or {TOKEN_VARIABLE}; {here}")
    return token


def worker_command(address: str, run: Path, num_workers: int) -> str:
    """The same as `join_command` for a worker; those of one machine get their share of its threads."""
    threads = f" --threads {max(1, cores() // num_workers)}" if num_workers > 1 else ""
    return join_command("worker", address, run, threads)


def join_command(verb: str, address: str, run: Path, flags_here: str = "") -> str:
    """The command, in quotes, by which a `worker` or `shard` joins a server, and where the token is that it needs.

    `flags_here` are added if it has to be given on this machine.

    >>> join_command("worker", "10.0.0.1:29500", Path("runs/a"))
    "'PACELINE_TOKEN=... paceline worker --connect 10.0.0.1:29500' (the token is in runs/a/token)"
    >>> join_command("worker", "127.0.0.1:29500", Path("runs/a"), " --threads 1")
    "'paceline worker --run runs/a --threads 1'"
    """
    host, port = parse_address(address)
    if is_loopback(host):
        return f"'paceline {verb} --run {run}{flags_here}'"
    where = f"{socket.gethostname()}:{port}" if host in ANYWHERE else address
    return f"'{TOKEN_VARIABLE}=... paceline {verb} --connect {where}' (the token is in {run}/token)"


def wants_tls(chosen: bool | None, address: str) -> bool:
    """Whether to use TLS: as chosen, else if other machines can reach the address.

    >>> wants_tls(None, "10.0.0.1:29500"), wants_tls(None, "127.0.0.1:29500"), wants_tls(True, "127.0.0.1:29500")
    (True, False, True)
    """
    return chosen if chosen is not None else not is_loopback(parse_address(address)[0])


def tls_of(options: ConnectOptions) -> Tls | None:
    """The TLS settings, or None without TLS."""
    authorities = Path(options.ca) if options.ca is not None else None
    on = options.fingerprint or authorities or wants_tls(options.tls, options.connect)
    return worker_tls(options.fingerprint, authorities) if on else None
