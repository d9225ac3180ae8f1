"""Files in the current folder that are named like modules of Python or torch: no process of ours imports one."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from paceline.runtimes.cluster import host_probe
from tests.support.cluster_commands import RUN, serve, workers
from tests.support.commands import run

FOREIGN = (
    *("csv", "hashlib", "html", "inspect", "json", "logging", "multiprocessing", "numpy", "pickle", "queue", "random"),
    *("rich", "safetensors", "select", "selectors", "socket", "statistics", "subprocess", "tempfile", "tomllib"),
    *("torch", "traceback"),
)
ALONE = {"OMP_NUM_THREADS": "1"}


def hostile(folder: Path) -> Path:
    """Fill a folder with such files; returns the file that each of them writes its name to."""
    marker = folder / "imported.txt"
    for name in FOREIGN:
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write('{name} ')\nraise ImportError")
    return marker


def imported(marker: Path) -> str:
    return marker.read_text() if marker.exists() else ""


def test_no_process_on_one_machine_imports_them(tmp_path: Path) -> None:
    marker = hostile(tmp_path)
    sync = ("--strategy", "sync", "--workers", "2", "--steps", "4", "--lr", "0.01", "--track", "csv")
    verbs = (("train", *RUN, *sync), ("replay", "runs/it"), ("report", "runs/it", "-o", "page.html"))
    for words in verbs:
        done = run(*words, cwd=tmp_path, environment=ALONE)
        assert imported(marker) == "", words
        assert done.process.returncode == 0, done.err


def test_no_server_shard_or_worker_imports_them(tmp_path: Path) -> None:
    marker = hostile(tmp_path)
    sync = ("--strategy", "sync", "--workers", "2", "--steps", "4", "--lr", "0.01", "--servers", "2")
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *RUN, *sync)
        (both,) = workers(stack, tmp_path, 1, "--overlap", "1")
        assert server.finish() == 0, server.err
        assert both.finish() == 0, both.err
    assert imported(marker) == ""


def test_the_probe_of_a_host_imports_none_from_the_folder_that_ssh_starts_in(tmp_path: Path) -> None:
    marker = hostile(tmp_path)
    source, question = Path(host_probe.__file__).read_text(), '{"data": null, "task": null, "reach": null}'
    command = [sys.executable, "-", question]
    done = subprocess.run(command, cwd=tmp_path, input=source, capture_output=True, text=True, timeout=60, check=False)
    assert imported(marker) == ""
    assert done.stdout.startswith(host_probe.MARK), done.stderr
