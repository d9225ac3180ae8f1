"""`paceline replay`: execute a run again from its arrival log and compare the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.analysis.listing import weights_problem
from paceline.assembly.preflight import require_device
from paceline.config import is_script, is_simulated
from paceline.data.datasets import load, locate_data
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runs.recording import Recording, ScriptCall, open_recording
from paceline.settings.strategies import in_this_process, on_ring


def replay(
    path: Path, console: Console, until: int | None = None, output: Path | None = None, inside: Path | None = None
) -> dict[str, Any]:
    """Replay the whole log, or up to update `until` and save its weights to `output`; return JSON values.

    A script runs again in its folder, or `inside` another one.
    """
    recording = open_recording(path, until, output)
    if inside is not None and not is_script(recording.config):
        raise UserError(f"--in {inside} is for a script of 'paceline run', and {path} has none: leave it out")
    if inside is not None and not inside.is_dir():
        raise UserError(f"--in {inside}: there is no such folder: create it first")
    for note in recording.notes():
        console.note(note)
    if is_script(recording.config):
        outcome = _replay_script(recording, console, inside)
    else:
        outcome = _replay_here(recording, console)
    return {**outcome, "damaged": weights_problem(recording.folder, recording.result or {})}


def _replay_here(recording: Recording, console: Console) -> dict[str, Any]:
    """Replay in this process: a `LocalWorker` recomputes every push."""
    config = recording.config
    if config.codec is not None and on_ring(config):
        found = f"{recording.folder.path} used --codec {config.codec} on a ring, whose buckets a replay cannot rebuild"
        raise UserError(f"{found}: only ring runs without a codec can be replayed")
    location = locate_data(config)
    require_device(config)

    from paceline.assembly.cpu_sharing import server_threads
    from paceline.assembly.run import make_server, make_worker, work_of
    from paceline.assembly.task import make_task, prepare_device
    from paceline.runs.compare_replay import checkpoints_by_record, compare
    from paceline.runs.replay import Replay, ReplayThreads
    from paceline.tasks.given_weights import read_given

    checkpoints = checkpoints_by_record(recording)
    device = prepare_device(config)
    dataset = load(location, report=console.report) if location is not None else None
    given = read_given(config, recording.folder.initial_file)
    task = make_task(config, dataset, given).to(device)
    work = work_of(task, config)
    own = config.threads or 1
    alone = in_this_process(config) or is_simulated(config)
    threads = ReplayThreads(own, own if alone else server_threads(config, task.layout))
    again = Replay(
        make_server(config, task, work),
        lambda join: make_worker(config, make_task(config, dataset, given).to(device), work, join),
        threads=threads,
        compare_with=checkpoints,
    )
    return compare(again, recording, task, console.report)


def _replay_script(recording: Recording, console: Console, inside: Path | None) -> dict[str, Any]:
    """Replay by starting the user's script again with the same number of workers."""
    from paceline.runtimes.scripts.replay import replay_script

    call = ScriptCall.load(recording.folder)
    if call.changed:
        console.note(f"script {call.path} was changed since the run: the replay may differ")
    if inside is None:
        does = "overwrites the files that it writes and repeats its uploads; --in DIR runs it in another folder"
    else:
        call = call.inside(inside)
        does = "writes there by its relative paths; it overwrites other files and repeats its uploads"
    console.note(f"replay runs {call.path.name} again in {call.cwd}: it {does}")
    return replay_script(recording, call, console.report)


def describe(outcome: dict[str, Any]) -> list[str]:
    """Return the outcome as sentences."""
    digest = outcome["weights_sha256"]
    lines = [f"{outcome['records']} records, {outcome['updates']} updates, weights {digest[:16]}"]
    if outcome["weights_file"] is not None:
        lines.append(f"weights of update {outcome['updates']} are in {outcome['weights_file']}, sha256 {digest}")
    mismatch = outcome["first_departure"]
    if mismatch is not None:
        lines.append(f"DIFFERENT from the run: {_where(mismatch)}")
        lines += [f"the run was made with {name} {value}" for name, value in outcome["made_with"].items()]
        if outcome["stuck"] is not None:
            lines.append(f"the replay could not continue: {outcome['stuck']}")
    elif outcome["identical"]:
        lines.append("identical to the run" + (", but not its files" if outcome.get("damaged") else ""))
    elif outcome["weights_file"] is not None:
        lines.append("every push up to that update equals the run's log")
    else:
        lines.append("the run has no result to compare; every push equals its log")
    if outcome.get("damaged"):
        again = f"'paceline replay {outcome['run']} --until {outcome['updates']}' writes the weights again"
        lines.append(f"{outcome['damaged']}: {again}")
    return lines


def _where(mismatch: dict[str, Any]) -> str:
    recorded, replayed, what = mismatch["recorded"], mismatch["replayed"], mismatch["what"]
    if what == "weights":  # the first difference lies after the last equal loss
        return f"by update {mismatch['update']}: its weights were {recorded}, are {replayed}"
    where = f"first at update {mismatch['update']}"
    if mismatch["push"] is not None:
        where += f", worker {mismatch['worker']}'s push {mismatch['push']}"
    if what == "push":
        return f"{where}: the run made it, the replay did not"
    if what == "loss":
        from numpy import float32

        recorded, replayed = float32(recorded), float32(replayed)  # prints enough digits to show the difference
    was, now = ("were", "are") if what == "samples" else ("was", "is")
    return f"{where}: {what} {was} {recorded}, {now} {replayed}"
