"""A mirror of a server that lies: bounded, and one line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.errors import RunFailed
from paceline.reports.watch import mirror as mirrors
from paceline.reports.watch.mirror import Mirror
from paceline.transports.file_client import FileChunk, FileClient
from tests.support.made_up_runs import make_folder


class Liar:
    """An observer's connection to a server that says of its events what it likes."""

    address, run = "10.0.0.1:29500", "runs/\x1b[2Jfar"

    def __init__(self, config: bytes, **lies: Any) -> None:
        self._config, self._lies = config, lies

    def read(self, name: str, offset: int = 0, most: int = 0) -> FileChunk | None:
        if name == "config.toml":
            return FileChunk(0, len(self._config), 0.0, self._config)
        if name == "result.json":
            return None
        true: dict[str, Any] = {
            "offset": max(0, offset),
            "size": 10,
            "age": 0.0,
            "data": b"0123456789"[max(0, offset) :],
        }
        return FileChunk(**true | self._lies)

    def close(self) -> None:
        pass


def mirror_of(tmp_path: Path, **lies: Any) -> Mirror:
    config = make_folder(tmp_path).config_file.read_bytes()
    (tmp_path / "copy").mkdir()
    return Mirror(lambda: cast(FileClient, Liar(config, **lies)), tmp_path / "copy")


@pytest.mark.parametrize(
    "lies", [{"age": math.inf}, {"age": math.nan}, {"age": -1e300}, {"size": -1}, {"size": 1 << 70}, {"offset": 5}]
)
def test_parts_that_make_no_sense_are_one_line(tmp_path: Path, lies: dict[str, Any]) -> None:
    with pytest.raises(RunFailed, match=r"no longer answers \(a part of arrivals.log that was not asked for\)"):
        mirror_of(tmp_path, **lies).refresh()


def test_a_file_that_is_said_to_be_endless_is_not_begun(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"it says that arrivals\.log has 1,125,899,906,842,624 bytes"):
        mirror_of(tmp_path, size=1 << 50, data=b"x" * 100).refresh()


def test_a_file_without_end_is_not_fetched_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "MAX_NBYTES", 1000, raising=False)
    lies = {"size": 900, "data": b"x" * 100}
    config = make_folder(tmp_path).config_file.read_bytes()
    (tmp_path / "copy").mkdir()
    liar = Liar(config, **lies)
    endless = Mirror(lambda: cast(FileClient, liar), tmp_path / "copy")
    endless.refresh()
    liar._lies["size"] = 1500
    with pytest.raises(RunFailed, match=r"sends more than 1,000 bytes of arrivals\.log"):
        endless.refresh()
    assert endless.folder.arrivals_file.stat().st_size <= 1000


def test_its_name_holds_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    honest = mirror_of(tmp_path)
    assert honest.refresh() and not honest.refresh()
    assert honest.run == "runs/\\x1b[2Jfar"
    honest.close()
