"""The key of a user: made once, mode 600, and refused if somebody else could have read or made it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from paceline.system.user_key import KEY_NBYTES, is_signed, key_file, sign


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_the_key_is_made_once_and_for_this_user_alone() -> None:
    first = sign(b"content")
    path = key_file()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(path.read_bytes()) == KEY_NBYTES and [entry.name for entry in path.parent.iterdir()] == ["key"]
    assert sign(b"content") == first and is_signed(b"content", first)


def test_another_content_and_another_key_are_told_apart() -> None:
    signature = sign(b"content")
    assert not is_signed(b"contents", signature) and not is_signed(b"content", "") and not is_signed(b"content", "é")
    key_file().unlink()
    sign(b"makes another key")
    assert not is_signed(b"content", signature)


def test_a_key_that_others_may_read_proves_nothing() -> None:
    signature = sign(b"content")
    key_file().chmod(0o640)
    with pytest.raises(PermissionError):
        is_signed(b"content", signature)


@pytest.mark.parametrize("kind", ["short", "link", "folder"])
def test_what_is_no_key_is_refused(home: Path, kind: str) -> None:
    path = key_file()
    path.parent.mkdir()
    if kind == "short":
        path.write_bytes(b"")
        path.chmod(0o600)
    elif kind == "link":
        (home / "elsewhere").write_bytes(bytes(KEY_NBYTES))
        (home / "elsewhere").chmod(0o600)
        path.symlink_to(home / "elsewhere")
    else:
        path.mkdir(mode=0o700)
    with pytest.raises(OSError):
        sign(b"content")
