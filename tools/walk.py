"""Count the functions on the path of one gradient, and the modules from a command to its first process.

    python tools/walk.py                 # this checkout's src
    python tools/walk.py --source DIR    # another checkout's src

It traces a short real run (async, one worker, shared memory). Every process records the functions of the package that
it calls: a worker from one gradient to the next, the server from one push to the next, the command from its first call
to the start of the first process. The exchange is that step without computing the gradient (tasks, models, data).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMPUTING = ("tasks", "models", "data", "randomness.py")
TRACER = """
import json, os, sys, threading
SOURCE, OUT = os.environ["WALK_SOURCE"], os.environ["WALK_OUT"]
WARM_UP = 20
class Walk:
    def __init__(self):
        self.calls, self.role, self.seen, self.command = [], None, 0, []
        self.started = False
    def __call__(self, frame, event, arg):
        if event != "call":
            return
        code = frame.f_code
        if code.co_name == "__init__" and code.co_filename.endswith("subprocess.py") and not self.started:
            self.started = True
            self.write("command", self.command)
        is_function = code.co_flags & 1 and not code.co_name.startswith("<")  # no module or class body, no lambda
        if not code.co_filename.startswith(SOURCE) or not is_function or "/__init__.py" in code.co_filename:
            return
        name = (code.co_filename[len(SOURCE):].lstrip("/"), getattr(code, "co_qualname", code.co_name))
        if not self.started:
            self.command.append(name)
        role = mark(*name)
        if role is not None and self.role in (None, role):
            self.role = role
            self.seen += 1
            if self.seen == WARM_UP + 1:
                self.write(role, self.calls)
                sys.setprofile(None)
                return
            self.calls = []
        if self.role is not None:
            self.calls.append(name)
    def write(self, role, calls):
        with open(os.path.join(OUT, role + ".json"), "w") as file:
            json.dump(calls, file, allow_nan=False)
def mark(file, function):
    if function == "SupervisedTask.gradient":
        return "worker"
    if function == "Server.handle" and file.startswith("core/"):
        return "server"
    return None
sys.setprofile(Walk())
"""


def trace(source: Path) -> dict[str, list[tuple[str, str]]]:
    """Run a short training of `source` under the tracer and return the calls of each role, in order."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "sitecustomize.py").write_text(TRACER, encoding="utf-8")
        out = place / "out"
        out.mkdir()
        package = source / "paceline"
        environment = {**os.environ, "WALK_SOURCE": f"{package}{os.sep}", "WALK_OUT": str(out)}
        environment["PYTHONPATH"] = f"{place}{os.pathsep}{source}"
        words = (
            "train --dataset fashion-mnist-sample --model lenet5 --strategy async --workers 1 --rule plain --steps 40"
        )
        command = [sys.executable, "-m", "paceline", *words.split(), "--lr", "0.01", "--name", "walk"]
        done = subprocess.run(
            [*command, "--runs", str(place / "runs")], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"the traced run failed:\n{done.stderr}")
        roles = ("command", "worker", "server")
        return {role: [tuple(call) for call in json.loads((out / f"{role}.json").read_text())] for role in roles}


def in_order(calls: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return each function once, in the order of first calls."""
    return list(dict.fromkeys(calls))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[1] / "src")
    parser.add_argument("--show", action="store_true", help="list the functions, not only their number")
    options = parser.parse_args()
    calls = trace(options.source.resolve())
    step = in_order(calls["worker"] + calls["server"])
    command = in_order(calls["command"])
    exchange = [call for call in step if call[0].split("/")[0] not in COMPUTING]
    titles = ("one gradient, worker to server and back", "the exchange alone", "command to first process")
    for title, functions in zip(titles, (step, exchange, command), strict=True):
        files = list(dict.fromkeys(file for file, _ in functions))
        print(f"{title}: {len(functions)} functions in {len(files)} files")
        if options.show:
            for file in files:
                print(f"  {file}: {', '.join(name for path, name in functions if path == file)}")


if __name__ == "__main__":
    main()
