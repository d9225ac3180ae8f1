"""Object stores of tests: in memory, which fail or wait when they are told to, and small run folders to copy."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

from paceline.config import RunConfig
from paceline.errors import StoreFailed
from paceline.object_store.store import ObjectStore
from paceline.object_store.takeover import take_ownership
from paceline.object_store.upload import FolderUpload
from paceline.runs.folder import RunFolder
from paceline.system.strict_json import to_json

CHECKPOINT = "checkpoints/{:012d}"


def silent(row: dict[str, object]) -> None:
    """Report nothing."""


def memory_url() -> str:
    """A URL in the memory of this process that no other test uses."""
    return f"memory://{uuid.uuid4().hex}/runs/it"


class TestStore(ObjectStore):
    """Counts what is put, and calls `before` with the name of each object that is about to be put."""

    __test__ = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.nbytes = self.puts = 0
        self.largest = 0
        self.before: Callable[[str], None] = lambda name: None

    def put(self, name: str, content: bytes) -> None:
        self.before(name)
        self.puts += 1
        self.nbytes += len(content)
        self.largest = max(self.largest, len(content))
        super().put(name, content)

    def fail_from(self, number: int) -> None:
        """Refuse every put after this many more."""
        left = [number]

        def refuse(name: str) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise StoreFailed(f"write {name}: no space")

        self.before = refuse


def made_run(runs: Path) -> RunFolder:
    """A run folder with a log, events, a checkpoint and secrets."""
    folder = RunFolder.create(RunConfig(workers=2, name="it", runs=str(runs)))
    folder.arrivals_file.write_bytes(bytes(range(256)) * 4)
    folder.events_file.write_bytes(b"{}\n" * 10)
    add_checkpoint(folder, 7)
    folder.token_file.write_text("secret")
    (folder.path / "tls").mkdir()
    (folder.path / "tls" / "key.pem").write_text("secret")
    (folder.path / ".config.toml.1.tmp").write_text("unfinished")
    (folder.path / "metrics.csv").write_text("derived")
    return folder


def add_checkpoint(folder: RunFolder, version: int) -> Path:
    """A checkpoint that refers to the present end of the log."""
    path = folder.path / CHECKPOINT.format(version)
    path.mkdir(parents=True)
    (path / "tensors.safetensors").write_bytes(version.to_bytes(2, "little") * 500)
    (path / "facts.json").write_text(to_json({"log_offset": folder.arrivals_file.stat().st_size}))
    return path


def append(path: Path, content: bytes) -> None:
    """Append to a file, as a run does."""
    with path.open("ab") as file:
        file.write(content)


def upload_of(folder: RunFolder, store: ObjectStore, part_nbytes: int = 1 << 20) -> FolderUpload:
    """The copy of a folder, as its owner."""
    return FolderUpload(folder.path, store, take_ownership(store, folder.path), part_nbytes=part_nbytes)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
