"""How the user is told of an exception in a worker's code."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from paceline.core.messages import Join, Reply
from paceline.core.worker import LocalWorker, work
from paceline.runtimes.local.failures import WorkerFailures, describe_exception

SCRIPT = "def helper():\n    raise ValueError('two\\nlines')\n\nhelper()\n"


def raised_by(path: Path, text: str) -> BaseException:
    path.write_text(text)
    with pytest.raises(BaseException) as caught:
        runpy.run_path(str(path))
    return caught.value


def test_a_stop_iteration_of_the_users_model_is_told_with_its_own_line(tmp_path: Path) -> None:
    """Our worker is a generator, out of which Python makes a RuntimeError of it."""
    model, stub = tmp_path / "model.py", Mock(**{"codecs.pull": None})
    model.write_text("raise StopIteration\n")
    stub.gradient = lambda batch: runpy.run_path(str(model))
    worker = LocalWorker.__new__(LocalWorker)
    worker._generator = work(stub, stub, Join(0, 0), stub, torch.zeros(1), torch.zeros(0))
    next(worker._generator)
    worker.pending = Reply(0, 0, 0, 0, 0)
    with pytest.raises(RuntimeError) as caught:
        worker.push()
    told = describe_exception(caught.value)
    assert told.text == "StopIteration (model.py, line 1)"
    assert "worker.py" not in told.traceback and "RuntimeError" not in told.traceback


@pytest.mark.long
def test_a_traceback_begins_with_the_users_code(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    code = (
        "import sys\nfrom paceline.runtimes.local.failures import describe_exception\nimport runpy\n"
        "from paceline.runtimes.scripts import process\n"
        "try:\n    process._run(sys.argv[1])\nexcept ValueError as error:\n"
        "    print(describe_exception(error.with_traceback(error.__traceback__.tb_next)).traceback)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    files = [line.split('"')[1] for line in done.stdout.splitlines() if line.startswith("  File")]
    assert files == [str(path), str(path)], done.stdout


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (SCRIPT, "ValueError: two lines (train.py, line 2)"),
        ("import json\n\njson.loads('{')\n", "line 3)"),
        ("import sys\nsys.exit('giving up')\n", "sys.exit('giving up') (train.py, line 2)"),
        ("x = (\n", "(train.py, line 1)"),
        ("raise EOFError('EOF when reading a line')", "; workers have no standard input: give the script arguments"),
        ("assert 1 == 2\n", "AssertionError (train.py, line 1)"),
    ],
)
def test_one_line_names_the_exception_and_its_place(script: str, text: str, tmp_path: Path) -> None:
    assert describe_exception(raised_by(tmp_path / "train.py", script)).text.endswith(text)


def test_one_line_has_the_notes_of_an_exception(tmp_path: Path) -> None:
    script = "error = ZeroDivisionError('by 0')\nerror.add_note('there was no batch')\nraise error\n"
    text, shown = describe_exception(raised_by(tmp_path / "train.py", script))
    assert text == "ZeroDivisionError: by 0 (train.py, line 3); there was no batch"
    assert shown.endswith("ZeroDivisionError: by 0\nthere was no batch\n")


def test_a_script_that_asks_for_a_process_group_is_told_to_leave_it_out(tmp_path: Path) -> None:
    script = "import torch.distributed as dist\n\ndist.init_process_group('gloo')\n"
    text = describe_exception(raised_by(tmp_path / "train.py", script)).text
    assert "(train.py, line 3); Paceline starts the workers and averages: leave out init_process_group" in text
    asks = "import torch.distributed as dist\n\nprint(dist.get_rank())\n"
    text = describe_exception(raised_by(tmp_path / "train.py", asks)).text
    assert "(train.py, line 3); Paceline makes none: leave this call out; session.worker" in text


FAILING_DATA = """
import torch
from paceline.runtimes.scripts.loading.indexed import SeededItems
from torch._utils import ExceptionWrapper

class Images(torch.utils.data.Dataset):
    def __getitem__(self, number):
        raise OSError("cannot read\\nimage 7")

data = Images()
try:
    SeededItems(data, data)[1, 7]
except OSError:
    wrapped = ExceptionWrapper(where="in DataLoader worker process 1")
wrapped.reraise()
"""


def test_an_error_of_a_loaders_process_is_told_as_it_was_raised_there(tmp_path: Path) -> None:
    """Torch wraps it: the error's own last line comes after its traceback."""
    found = describe_exception(raised_by(tmp_path / "train.py", FAILING_DATA))
    assert found.text == "OSError: cannot read image 7 (train.py, line 8)"
    assert "Caught OSError in DataLoader worker process 1." in found.traceback
    assert "/paceline/" not in found.traceback and found.traceback.endswith("OSError: cannot read\nimage 7\n\n")


def test_one_traceback_is_shown_and_a_line_for_each_other_failure() -> None:
    rows: list[dict[str, Any]] = []
    failures = WorkerFailures()
    assert not failures and failures.seconds_left is None
    for number, text in enumerate(["A: a", "A: a", "B: b", "A: a"]):
        failures.add(f"worker {number} of 4", {"text": text, "traceback": f"traceback {number}\n{text}\n"})
    failures.tell(rows.append)
    assert [row["text"] for row in rows] == ["traceback 0", "A: a", "worker 2 of 4: B: b"]
    assert failures.line == "worker 0 of 4: A: a; and 2 other workers: the same"
    assert failures.seconds_left is None
