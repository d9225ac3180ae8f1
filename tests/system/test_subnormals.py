"""Subnormal floats become zero in the calling thread, in torch's pool and in later threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.long  # left to `make test`

LEFT = """
import threading, torch
from paceline.system.subnormals import flush_subnormals

torch.set_num_threads(2)
tiny = torch.full((1 << 20,), 1e-39)
left = lambda: int((tiny * 0.5).view(torch.int32).count_nonzero())
before = left()  # starts the pool
flush_subnormals()
found = [left()]
thread = threading.Thread(target=lambda: found.append(left()))
thread.start()
thread.join()
torch.set_num_threads(1)
print(before, *found, left())
"""


def test_subnormal_floats_are_zero_in_every_thread_even_if_the_pool_runs_already() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(1 << 20), "0", "0", "0"]
