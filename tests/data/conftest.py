"""A private cache and system folder for every test, and a writer of idx folders."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.support.data_files import Write, idx_contents


@pytest.fixture(autouse=True)
def private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("PACELINE_SYSTEM_DATA", str(tmp_path / "system"))
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    monkeypatch.delenv("PACELINE_MIRROR", raising=False)


@pytest.fixture
def write_idx() -> Write:
    def write(folder: Path, packed: bool = True, **sizes: int) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in idx_contents(**sizes).items():
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
            else:
                (folder / name).write_bytes(content)
        return folder

    return write
