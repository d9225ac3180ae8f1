"""A secret key of this user, in their configuration folder: what it signed, this user made."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

KEY_NBYTES = 32


def key_file() -> Path:
    """Return the file of the key: `paceline/key` in XDG_CONFIG_HOME, which is ~/.config by default."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return Path(home if home else Path.home() / ".config", "paceline", "key")


def sign(content: bytes) -> str:
    """Return the signature of `content`; make the key if there is none. Raise OSError if that is impossible."""
    with contextlib.suppress(FileNotFoundError):
        return _signature(content)
    _make_key(key_file())
    return _signature(content)


def is_signed(content: bytes, signature: str) -> bool:
    """Whether `signature` was made by this user's key. Raise OSError if there is no key to compare with."""
    return hmac.compare_digest(_signature(content).encode(), signature.encode(errors="replace"))


def _signature(content: bytes) -> str:
    return hmac.new(_read_key(key_file()), content, hashlib.sha256).hexdigest()


def _make_key(path: Path) -> None:
    """Create the key, or leave the one that another process creates at the same time."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
        file.write(secrets.token_bytes(KEY_NBYTES))
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


def _read_key(path: Path) -> bytes:
    """Read the key; a key that somebody else may have read or made proves nothing."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise PermissionError(1, "it is not a file of mode 600 of this user")
        key = file.read(KEY_NBYTES + 1)
    if len(key) != KEY_NBYTES:
        raise OSError(22, f"it does not hold {KEY_NBYTES} bytes")
    return key
