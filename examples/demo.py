"""`make demo`: one model under four strategies, a killed worker, a killed run, a replay, and why the runs differ.

Every step is a `paceline` command, which is printed, so that you can repeat it. A step that does not do what it should
ends the demo with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import webbrowser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from paceline.runs.events import read_events

STRATEGIES = {"classic": "classic", "sync": "sync", "async": "async", "bounded": "bounded:2"}
"""The compared runs by name; `classic` is one worker, the others have WORKERS."""
WORKERS = 2
SETTINGS = """# What all runs of the demo share; flags set the strategy.
dataset = "fashion-mnist-sample"
model = "lenet5"
epochs = {epochs}
average = "on"
warmup = 0.1  # rule auto warms up by default, so the others do too
threads = 1  # of each worker, so that 'classic' too computes on one core
"""
FAULTS = """[[fault]]
kind = "crash"    # SIGKILL to the process of worker 1
worker = 1
at = {at}        # seconds of training
"""
STORY = """The same small network learns the same images four times. Several processes, the workers, compute gradients;
a parameter server applies them to the weights. The strategy is when it answers: 'sync' waits for all workers, 'async'
for none, 'bounded' if one runs ahead. 'classic' is plain SGD in one process. Then a worker is killed, a whole run is
killed and resumed, and its log is replayed."""
POLL_SECONDS = 0.005
STOPPING_SECONDS = 10.0
Result = Mapping[str, Any]


def fail(what: str) -> NoReturn:
    """End the demo: a step did not do what it should."""
    sys.exit(f"demo failed: {what}")


def say(text: str, behind: str = "") -> None:
    """Print a paragraph, wrapped to the terminal; its further lines begin with `behind`."""
    width, words = min(shutil.get_terminal_size().columns, 100), " ".join(text.split())
    lines = textwrap.wrap(words, width, subsequent_indent=behind, break_long_words=False, break_on_hyphens=False)
    print("\n".join(lines), flush=True)


class Progress:
    """One line that is overwritten while a command runs; silent if the output is no terminal."""

    def __init__(self, name: str) -> None:
        self._name = name

    def show(self, folder: Path) -> None:
        """Show how far the run in this folder is."""
        if not sys.stdout.isatty():
            return
        with contextlib.suppress(OSError):
            rows = [row for row in read_events(folder / "events.jsonl") if row["kind"] == "progress"]
            if rows and rows[-1].get("loss") is not None:
                print(
                    f"\r  {self._name:<8} {rows[-1]['fraction']:4.0%}  loss {rows[-1]['loss']:.3f}  ",
                    end="",
                    flush=True,
                )

    def replace(self, text: str) -> None:
        """Put the outcome in the place of the progress."""
        print(f"{chr(13) if sys.stdout.isatty() else ''}  {self._name:<8} {text}", flush=True)


class Demo:
    """The commands of the demo, run in one folder."""

    def __init__(self, folder: Path, epochs: float, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack, self._has_page = folder, stack, False
        (folder / "runs").mkdir(parents=True)
        (folder / "settings.toml").write_text(SETTINGS.format(epochs=epochs))

    @contextlib.contextmanager
    def started(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Print and start a command in a session of its own; end all its processes on the way out."""
        print(f"$ paceline {' '.join(words)}", flush=True)
        command, pipe = [sys.executable, "-m", "paceline", *words], subprocess.PIPE
        environment = {**os.environ, "COLUMNS": str(shutil.get_terminal_size().columns)}  # of our terminal, for tables
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOPPING_SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def finish(self, process: subprocess.Popen[str]) -> str:
        """Wait for the end of a command and return what it printed; fail if it failed."""
        output, messages = process.communicate()
        if process.returncode:
            last = (messages.strip().splitlines() or ["it said nothing"])[-1]
            fail(f"the command ended with exit code {process.returncode}: {last}")
        return output

    def run(self, *words: str) -> str:
        """Run a command to its end and return what it printed."""
        with self.started(*words) as process:
            return self.finish(process)

    def train(self, name: str, *words: str) -> Result:
        """Run a command that trains the run `name`, with its progress; return its result."""
        with self.started(*words) as process:
            progress = Progress(name)
            while process.poll() is None:
                self._serve_page()
                progress.show(self.path(name))
                time.sleep(0.1)
            self.finish(process)
        result: Result = json.loads((self.path(name) / "result.json").read_text())
        if result["status"] != "finished":
            fail(f"the run {name} has the status {result['status']} instead of finished")
        pace = f"{result['updates']:,} updates, {result['train_seconds']:.1f} s"
        progress.replace(f"{result['test_accuracy']:.2f} % test accuracy, {pace}")
        return result

    def _serve_page(self) -> None:
        """Serve the live page from the first run on, until the demo ends, and print its address."""
        if self._has_page or not any((self.folder / "runs").glob("*/config.toml")):
            return
        self._has_page = True
        process = self._stack.enter_context(self.started("watch", "runs"))
        assert process.stdout is not None
        address = next((found[0] for line in process.stdout if (found := re.search(r"http://\S+", line))), None)
        if address is None:
            self.finish(process)
            fail("'paceline watch' printed no address")
        print(f"  live page while it trains: {address}", flush=True)

    def path(self, name: str) -> Path:
        """The folder of a run."""
        return self.folder / "runs" / name


def new_run(name: str, strategy: str, *flags: str) -> tuple[str, ...]:
    """The words of `paceline train` for one run of the demo."""
    workers = () if strategy == "classic" else ("--workers", str(WORKERS))
    return "train", "settings.toml", "--strategy", strategy, *workers, "--name", name, *flags


def kill_worker(demo: Demo, healthy: Result) -> None:
    """Train as `healthy` was trained, and kill worker 1 early on."""
    at = round(healthy["train_seconds"] / 8, 3)
    (demo.folder / "faults.toml").write_text(FAULTS.format(at=at))
    result = demo.train("faulty", *new_run("faulty", "async", "--faults", "faults.toml"))
    if result["lost_workers"] != [1]:
        fail(f"worker 1 was to be killed at {at} s; lost workers: {result['lost_workers']}: try more --epochs")
    share = result["updates"] / healthy["updates"]
    say(f"Worker 1 was killed after {at} s. Worker 0 went on, to {share:.0%} of the updates of the run 'async'.")


def kill_and_resume(demo: Demo, healthy: Path) -> None:
    """Kill a whole run, server and all, when its log is a third as long as that of a healthy one; then resume it."""
    wanted = (healthy / "arrivals.log").stat().st_size // 3
    log = demo.path("killed") / "arrivals.log"
    with demo.started(*new_run("killed", "async")) as process:
        while process.poll() is None and not (log.exists() and log.stat().st_size >= wanted):
            time.sleep(POLL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    print(f"$ kill -9 -- -{process.pid}", flush=True)
    if process.returncode != -signal.SIGKILL or (demo.path("killed") / "result.json").exists():
        fail(f"the run was to be killed, and ended with exit code {process.returncode} before: try more --epochs")
    result = demo.train("killed", "resume", "runs/killed")
    if result["resumes"] != 1 or result["lost_pushes"]:
        fail(f"the run was resumed {result['resumes']} times and lost {result['lost_pushes']} pushes, not 1 and 0")
    say("All its processes were killed at once. The server logs a push before it replies, so 'resume' lost none.")


def replay(demo: Demo) -> None:
    """Compute the killed and resumed run again from its log."""
    outcome = json.loads(demo.run("replay", "runs/killed", "--json"))
    if outcome["identical"] is not True:
        fail(f"the replay of runs/killed is not identical to the run: see 'paceline replay {demo.path('killed')}'")
    say(f"Identical: {outcome['updates']:,} updates, in an order that was chance, gave the same weights bit for bit.")


def noise_points(one: Result, other: Result) -> float:
    """Percentage points by which two equally good models may differ on so few test images, 19 times of 20."""
    variance = sum((right := run["test_accuracy"] / 100) * (1 - right) / run["test_total"] for run in (one, other))
    return 196 * math.sqrt(variance)


def difference(name: str, run: Result, alone: Result) -> str:
    """One clause: how a run's accuracy differs from that of `classic`, and why."""
    shown, other = (round(one["test_accuracy"], 2) for one in (run, alone))  # the difference agrees with the table
    points, noise = round(shown - other, 2) + 0.0, noise_points(run, alone)
    if abs(points) <= noise:
        accuracy = f"is level with classic ({points:+.2f} points; up to {noise:.2f} can be chance)"
    else:
        side = "above" if points > 0 else "below"
        accuracy = f"is {abs(points):.2f} points {side} classic (up to {noise:.2f} can be chance)"
    updates, stale = run["updates"] / alone["updates"], run["staleness"]["mean"]
    if updates < 0.9:
        alike = math.isclose(run["samples"], alone["samples"], rel_tol=0.01) and run["lr"] == alone["lr"]
        link = "although" if points >= -noise else "because"
        cause = f"{link} it made {updates:.0%} of its updates" + " from as many samples at the same lr" * alike
        cause += " (--scale-lr auto would make longer ones)" * (alike and points < -noise)
    elif stale >= 0.1:
        rule = run["rule_applied"].split()[0]
        corrected = "" if rule.startswith("plain") else f", for which rule {rule} corrects"
        cause = f"with as many updates, from gradients {stale:.1f} updates old on average{corrected}"
    else:
        cause = "with as many updates and no stale gradient"
    return f"{name} {accuracy} {cause}"


def computing(run: Result) -> float:
    """The share of the training time in which an average worker computed."""
    shares = [worker["computing"] for worker in run["utilisation"]]
    return sum(shares) / len(shares)


def verdict(results: Mapping[str, Result]) -> list[str]:
    """The clauses of one sentence about why the runs differ, from what was measured; `classic` is the first of them."""
    alone = results["classic"]
    others = {name: run for name, run in results.items() if name != "classic"}
    shares = {name: run["train_seconds"] / alone["train_seconds"] for name, run in others.items()}
    if any(share < 0.9 / others[name]["workers"] for name, share in shares.items()):
        times = "the times say nothing, since they differ by more than the workers explain: the machine was busy"
    else:
        took = ", ".join(f"{share:.0%}" for share in shares.values())
        computed = ", ".join(f"{computing(run):.0%}" for run in others.values())
        times = f"they took {took} of the training time of classic, measured once"
        if min(shares.values()) > 0.9:
            rest = "exchanged or waited for the rest, which steps as short as these do not make up for"
            times += f", because their workers computed {computed} of it and {rest}"
    return [*(f"{difference(name, run, alone)};" for name, run in others.items()), f"{times}."]


def show_report(page: Path) -> None:
    """Print the path of the report, and open it if there is a display and a browser for it."""
    print(f"  report: {page}", flush=True)
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    with contextlib.suppress(webbrowser.Error, OSError):
        browser = webbrowser.get()
        if type(browser) is not webbrowser.GenericBrowser:  # that would be one in this terminal
            browser.open(page.resolve().as_uri())


def tell(demo: Demo) -> None:
    """The whole story."""
    say(STORY)
    print(f"\n$ cd {demo.folder}", flush=True)
    results = {name: demo.train(name, *new_run(name, text)) for name, text in STRATEGIES.items()}
    print("\nA worker is killed, and the run goes on:", flush=True)
    kill_worker(demo, results["async"])
    print("\nA whole run is killed, and resumed:", flush=True)
    kill_and_resume(demo, demo.path("async"))
    print("\nThe killed run again, from its log:", flush=True)
    replay(demo)
    print("\nThe four strategies compared:", flush=True)
    print(demo.run("compare", *(f"runs/{name}" for name in STRATEGIES)), flush=True)
    print("Verdict:", flush=True)
    for clause in verdict(results):
        say(f"- {clause}", behind="  ")
    print(flush=True)
    demo.run("report", "runs", "-o", "report.html")
    show_report(demo.folder / "report.html")


def interrupt(number: int, frame: object) -> NoReturn:
    """Stop once, however often and by whichever signal we are asked to."""
    for asked in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(asked, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    """Tell the story in a new folder below `runs`; return the exit code."""
    parser = argparse.ArgumentParser(description="Train one model in several ways, with faults, and compare.")
    parser.add_argument("--epochs", type=float, default=3.0, help="epochs of every run [3]")
    asked = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    folder = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    try:
        with contextlib.ExitStack() as stack:
            tell(Demo(folder, asked.epochs, stack))
    except KeyboardInterrupt:
        print(f"\nstopped; what is there so far is in {folder}", flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
