"""A noticeboard of files: what one process tells the others hear, and nobody else can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.transports.rendezvous import FileRendezvous


def test_what_the_keeper_tells_the_others_hear(tmp_path: Path) -> None:
    keeper, other = (FileRendezvous(tmp_path / "runs", "7.0.0", keeper) for keeper in (True, False))
    assert other.wait_for("server", 0.0) is None
    keeper.tell("server", {"address": "node1:2950"})
    other.tell("heard/1", {})
    assert other.wait_for("server", 0.0) == {"address": "node1:2950"}
    assert keeper.wait_for("heard/1", 0.0) == {}


def test_nobody_else_can_read_it_and_nothing_is_left(tmp_path: Path) -> None:
    keeper = FileRendezvous(tmp_path, "7.0.0", keeper=True)
    keeper.tell("server", {"token": "secret"})
    (file,) = keeper.path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(keeper.path.stat().st_mode) == 0o700
    FileRendezvous(tmp_path, "7.0.0", keeper=False).close()
    assert file.exists()
    keeper.close()
    assert list(tmp_path.iterdir()) == []


def test_another_attempt_hears_nothing_of_the_last(tmp_path: Path) -> None:
    FileRendezvous(tmp_path, "7.0.0", keeper=True).tell("server", {"address": "old"})
    assert FileRendezvous(tmp_path, "7.0.1", keeper=True).wait_for("server", 0.0) is None


@pytest.mark.parametrize("how", ["open to others", "of another user", "a link"])
def test_a_folder_that_is_not_ours_alone_is_neither_read_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Whoever can write there tells every rank which server to obey, and with which token."""
    place = tmp_path / ".step-7.0.0"
    if how == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir(mode=0o700)
    (place / "server.json").write_text('{"address": "6.6.6.6:666", "token": "his", "tls": false}')
    if how == "open to others":
        place.chmod(0o770)
    elif how == "of another user":
        monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    with pytest.raises(UserError, match=r"not ours alone \(700\): remove it"):
        FileRendezvous(tmp_path, "7.0.0", keeper=True)
    other = FileRendezvous(tmp_path, "7.0.0", keeper=False)
    with pytest.raises(UserError, match="not ours alone"):
        other.wait_for("server", 0.0)
    with pytest.raises(UserError, match="not ours alone"):
        other.tell("heard/1", {})
