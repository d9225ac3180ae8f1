"""Verbs about this machine: `data` and `doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cli.arguments import Parser
from paceline.errors import PacelineError, UserError
from paceline.system.cpu import busy_line, cores
from paceline.system.environment import cpu_name, package_version
from paceline.system.memory import available_memory
from paceline.system.shared_segment import Segment
from paceline.system.terminal import fold_for, table_width


def data_verb(arguments: list[str]) -> int:
    parser = Parser("data", "List the data sets and their folders, or download one.")
    parser.add_choice("action", ("list", "get"))
    parser.add("name", "data set to download", nargs="?")
    parser.add("--data-dir", "folder to search first, or to download to", metavar="DIR")
    parser.add("--mirror", "address to download from, instead of the official one", metavar="URL")
    parsed = parser.parse_strictly(arguments)
    place = Path(parsed.data_dir) if parsed.data_dir is not None else None
    if parsed.action == "list":
        from paceline.data.download import status
        from paceline.reports.tables import data_table

        print(data_table(status(place), table_width()))
        return 0
    if parsed.name is None:
        raise UserError("no data set given: 'paceline data list' shows them, as in 'paceline data get fashion-mnist'")
    from paceline.data.download import get

    print(get(parsed.name, place, parsed.mirror))
    return 0


def doctor_verb(arguments: list[str]) -> int:
    checks = "Check the software, cores, memory, disk and data sets of this machine, and advise what to change."
    Parser("doctor", checks).parse_strictly(arguments)
    found = MachineReport()
    for check in (_software, _processor, _memory, _disk, _data):
        check(found)
    print(fold_for(sys.stdout, found.lines))
    return 0 if found.usable else 1


@dataclass
class MachineReport:
    """Lines to print, and whether a run can work on this machine."""

    lines: list[str] = field(default_factory=list)
    usable: bool = True

    def good(self, text: str) -> None:
        self.lines.append(f"ok    {text}")

    def advise(self, text: str) -> None:
        self.lines.append(f"note  {text}")

    def bad(self, text: str) -> None:
        self.lines.append(f"BAD   {text}")
        self.usable = False


def _software(found: MachineReport) -> None:
    found.good(f"Python {platform.python_version()} on {platform.system()} {platform.release()}")
    if platform.system() != "Linux":
        found.bad("local workers share memory through Linux's memfd: on this system only --strategy classic works")
    try:
        import torch
    except ImportError as error:
        found.bad(f"torch cannot be imported ({error}): 'pip install -c constraints.txt -e .' installs it")
        return
    found.good(f"torch {torch.__version__}, numpy {package_version('numpy')}, paceline {package_version('paceline')}")
    if torch.cuda.is_available():
        found.good(f"CUDA: {torch.cuda.get_device_name(0)}; --device cuda puts all workers on it")
    else:
        found.advise("no CUDA device: workers compute on the CPU")


def _processor(found: MachineReport) -> None:
    num_cores = cores()
    found.good(f"{num_cores} cores ({cpu_name()}): up to {num_cores} workers run side by side, more share them")
    limit = os.environ.get("OMP_NUM_THREADS")
    if limit is not None:
        found.advise(f"OMP_NUM_THREADS={limit} is set; workers set their own thread count (--threads) instead")
    if (busy := busy_line()) is not None:
        found.advise(busy)
    steal = _steal_share()
    if steal > 0.02:
        found.advise(f"{100 * steal:.0f} % of the processor's time since boot was taken by other machines on this host")


def _steal_share() -> float:
    try:
        fields = [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    return fields[7] / max(1, sum(fields)) if len(fields) == 8 else 0.0


def _memory(found: MachineReport) -> None:
    found.good(f"{available_memory() / 2**30:.1f} GiB of memory are free")
    try:
        Segment.create(1 << 20, "doctor's test").close_descriptor()
        found.good("shared memory can be made, reserved and sealed")
    except (PacelineError, OSError) as error:
        found.bad(f"shared memory cannot be made ({error}): only --strategy classic works")


def _disk(found: MachineReport) -> None:
    free = shutil.disk_usage(".").free
    text = f"{free / 2**30:.1f} GiB are free in this folder, the default place of runs/"
    (found.good if free > 1 << 30 else found.advise)(text)
    try:
        with tempfile.TemporaryFile(dir="."):
            pass
    except OSError as error:
        found.advise(f"this folder cannot be written ({error.strerror}): give --runs DIR")


def _data(found: MachineReport) -> None:
    from paceline.data.datasets import remedy
    from paceline.data.download import status

    for row in status(None):
        if row.found and not row.sample:
            found.good(f"data set {row.name}: {row.origin}, {row.path}")
        elif not row.found or row.name == "fashion-mnist":
            state = "a built-in sample only" if row.found else "not here"
            found.advise(f"data set {row.name}: {state}; {remedy(row.name)}")
