"""Verbs of runs on several machines: serve a run, work for a server, hold a shard, drain workers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.arguments import (
    Parser,
    add_settings,
    add_take_over,
    add_trust,
    config_from,
    require_trust,
    run_to_resume,
    script_of,
)
from paceline.cli.output import show
from paceline.config import SIMULATED_ONLY, UPKEEP, RunConfig, given
from paceline.errors import RunFailed, UserError
from paceline.interfaces import MAX_WORKERS
from paceline.reports.console import Console
from paceline.settings.features import SCRIPT_DECIDES

if TYPE_CHECKING:
    from paceline.transports.auth import ConnectOptions

SERVER_DESCRIPTION = """Serve a run to workers on other machines; the run folder stays here.

  paceline server --strategy async --workers 2                         for workers on this machine
  paceline server --strategy sync --workers 8 --listen 0.0.0.0:29500   for other machines; prints a new token once
  paceline server --strategy async --workers 2 --script train.py --epochs 3   your own loop; its arguments come last
  paceline server --resume runs/NAME                                   continue after the server ended"""
WORKER_DESCRIPTION = """Connect a worker to a server, which sends the settings. The data is read on this machine.

  paceline worker --run runs/NAME                                      on the server's own machine
  paceline worker --connect 10.0.0.1:29500 --token-file token --data-dir DIR
  PACELINE_TOKEN=... paceline worker --connect 10.0.0.1:29500 --threads 4"""
SHARD_DESCRIPTION = """Hold a range of the weights for 'paceline server --servers S --shards-elsewhere'.

  paceline shard --connect 10.0.0.1:29500 --token-file token"""
PATIENCE_SECONDS = 300.0


def server_verb(arguments: list[str]) -> int:
    parser = Parser("server", SERVER_DESCRIPTION, "paceline server [RUN.toml] [flags]")
    parser.add("file", "file of settings; flags override it", nargs="?", metavar="RUN.toml")
    parser.add("--listen", "address for workers [127.0.0.1 and a free port]", "network", metavar="HOST:PORT")
    token = "file with the token of the run [PACELINE_TOKEN, or a new one]"
    parser.add("--token-file", token, "network", metavar="FILE")
    add_encryption(parser, "encrypt [unless --listen is of this machine alone; with --resume: as before]", "network")
    parser.add("--certificate", "TLS certificate; needs --key [a new one]", "network", metavar="FILE")
    parser.add("--key", "private key of --certificate", "network", metavar="FILE")
    servers = "divide the weights over S server processes [1; with --resume: as before]"
    parser.add("--servers", servers, "network", type=int, metavar="S")
    elsewhere = "wait for S - 1 'paceline shard' commands instead of starting processes here"
    parser.add("--shards-elsewhere", elsewhere, "network", action="store_true")
    wait = "exit with code 1 if not all workers have connected by then [no limit]"
    parser.add("--wait", wait, "network", type=float, metavar="SECONDS")
    resume = "continue a run whose server ended, at the same address; or the URL of a copy, with --listen"
    parser.add("--resume", resume, "network", metavar="RUN")
    add_take_over(parser)
    again = "start the run --name, or resume it if it has begun: for a program that starts this command again"
    parser.add("--continue", again, "network", action="store_true")
    script = "serve workers that run this script; all that follows are its arguments"
    parser.add("--script", script, nargs=argparse.REMAINDER, metavar="SCRIPT.py ...")
    add_settings(parser, left_out=(*SIMULATED_ONLY, "faults", "device"))
    add_trust(parser)
    parser.add("--json", "print result.json on standard output at the end", action="store_true")
    parsed = parser.parse_strictly(arguments)
    from paceline.runtimes.cluster.credentials import ListenOptions
    from paceline.runtimes.cluster.serve import serve, serve_again, serve_or_resume

    if (parsed.certificate is None) != (parsed.key is None):
        raise UserError("--certificate and --key belong together: give both, or none and one is made")
    if parsed.wait is not None and parsed.wait <= 0:
        raise UserError(f"--wait {parsed.wait:g}: give the seconds to wait for all workers, as in --wait 600")
    tls = chosen_tls(parsed, "certificate"), parsed.certificate, parsed.key
    shards = parsed.servers, parsed.shards_elsewhere
    options = ListenOptions(parsed.listen, parsed.token_file, *tls, *shards, parsed.wait)
    is_continued = getattr(parsed, "continue")
    command = script_of(parsed.script, parser) if parsed.script is not None else None
    if parsed.resume is not None and is_continued:
        raise UserError(f"--resume {parsed.resume} and --continue: leave one out; --continue takes --name and settings")
    with Console() as console:
        if is_continued:
            config = config_from(parsed, parsed.file)
            _refuse_script_settings(config, command)
            folder, result = serve_or_resume(config, options, console, command)
        elif parsed.resume is not None:
            if parsed.script is not None:
                raise UserError(f"--resume {parsed.resume} goes on with the script of that run: leave --script out")
            with run_to_resume(parsed, parsed.resume, console) as path:
                require_trust(parsed, path, trackers=parsed.track is None, mirror=parsed.mirror is None)
                upkeep = {name: getattr(parsed, name) for name in UPKEEP if getattr(parsed, name) is not None}
                folder, result = serve_again(Path(path), options, console, upkeep=upkeep)
        elif parsed.take_over:
            raise UserError("--take-over is about a run in a store: add --resume URL")
        else:
            config = config_from(parsed, parsed.file)
            _refuse_script_settings(config, command)
            folder, result = serve(config, options, console, command=command)
    return show(folder, result, parsed.json)


def _refuse_script_settings(config: RunConfig, command: list[str] | None) -> None:
    """Refuse settings that a user's script decides itself."""
    if command is None:
        return
    for name in given(config, tuple(name for name in SCRIPT_DECIDES if name not in ("workers", "recovery"))):
        script = command[0] if command else "your script"
        raise UserError(f"--{name.replace('_', '-')} {getattr(config, name)}: {script} decides that; leave it out")


def add_encryption(parser: Parser, help_text: str, group: str | None = None, basic: bool = True) -> None:
    """Add the flags that turn TLS on or off."""
    parser.add("--tls", help_text, group, basic, action="store_true")
    parser.add("--plain", "do not encrypt, for a private network", group, basic, action="store_true")


def chosen_tls(parsed: argparse.Namespace, *implying: str) -> bool | None:
    """Whether the user chose TLS, also by flags that imply it. None if no flag says so."""
    on = [name for name in ("tls", *implying) if getattr(parsed, name)]
    if on and parsed.plain:
        raise UserError(f"--{on[0]} encrypts and --plain does not: leave one out")
    return True if on else False if parsed.plain else None


def add_proof(parser: Parser) -> None:
    """Add the flags that authenticate a client to a server, and the server to the client."""
    parser.add("--token-file", "file with the token of the server [PACELINE_TOKEN]", metavar="FILE")
    add_encryption(parser, "encrypt; the token authenticates the server's certificate [unless it is on this machine]")
    parser.add("--fingerprint", "use TLS, and accept only the certificate with this fingerprint", metavar="HEX")
    parser.add("--ca", "use TLS, and accept only certificates that this one signed", metavar="FILE")


def _add_connection(parser: Parser) -> None:
    parser.add("--connect", "address of the server", metavar="HOST:PORT")
    parser.add("--run", "run folder of a server on this machine: finds address, token and certificate", metavar="RUN")
    add_proof(parser)
    patience = "seconds to retry while the server cannot be reached, at the start at most 30 [%(default)g]"
    parser.add("--patience", patience, type=float, default=PATIENCE_SECONDS, metavar="S")


def _connect_options(parsed: argparse.Namespace) -> ConnectOptions:
    """How to reach the server: as the flags say, else as the folder of `--run` does."""
    from paceline.runtimes.cluster.credentials import server_of_run
    from paceline.transports.auth import ConnectOptions

    if (parsed.run is None) == (parsed.connect is None):
        here, there = "--run RUN for a server on this machine", "--connect HOST:PORT for another machine's"
        raise UserError(f"{'one' if parsed.run else 'either'} of two is needed: {here}, {there}")
    given = {**vars(parsed), "tls": chosen_tls(parsed, "fingerprint", "ca")}
    del given["run"], given["plain"]
    found = server_of_run(Path(parsed.run)) if parsed.run is not None else {}
    if parsed.plain and found.get("tls"):
        raise UserError(f"--plain, but {parsed.run} is served over TLS: leave it out")
    return ConnectOptions(**{**given, **{name: value for name, value in found.items() if given[name] is None}})


def shard_verb(arguments: list[str]) -> int:
    parser = Parser("shard", SHARD_DESCRIPTION, "paceline shard --connect HOST:PORT|--run RUN [flags]")
    _add_connection(parser)
    parser.add("--listen", "address for workers [the interface that reaches the server]", metavar="HOST:PORT")
    parser.add("--once", "end when the server is gone, instead of waiting until it is back", action="store_true")
    parsed = parser.parse_strictly(arguments)
    from paceline.runtimes.cluster.join import join_as_shard

    listen, once = vars(parsed).pop("listen"), vars(parsed).pop("once")
    with Console() as console:
        return 0 if join_as_shard(_connect_options(parsed), listen, once, console) else 1


def worker_verb(arguments: list[str]) -> int:
    parser = Parser("worker", WORKER_DESCRIPTION, "paceline worker --connect HOST:PORT|--run RUN [flags]")
    _add_connection(parser)
    parser.add("--data-dir", "folder that holds the data set on this machine", metavar="DIR")
    weights = "this machine's copy of the server's --weights FILE, if it is elsewhere [with --run: the run's own]"
    parser.add("--weights", weights, metavar="FILE")
    parser.add("--threads", "threads of this worker [all cores]", type=int, metavar="N")
    device = "cpu, cuda or cuda:N; with cuda the server needs --recovery checkpoint [%(default)s]"
    parser.add("--device", device, metavar="NAME", default="cpu")
    parser.add("--worker", "number of this worker [any free number]", type=int, metavar="N")
    overlap = "run D + 1 workers in this process: one computes while the push of another travels [%(default)s]"
    parser.add("--overlap", overlap, type=int, default=0, metavar="D")
    script = "file of the run's script on this machine [the same path as on the server's]"
    parser.add("--script", script, metavar="FILE")
    parsed = parser.parse_strictly(arguments)
    from paceline.runs.folder import RunFolder
    from paceline.runtimes.cluster.join import join_server

    if (
        parsed.run is not None
        and parsed.weights is None
        and (copy := RunFolder(Path(parsed.run)).initial_file).is_file()
    ):
        parsed.weights = str(copy)
    with Console() as console:
        return 0 if join_server(_connect_options(parsed), console) else 1


DESCRIPTION = """Remove workers from a running run. Each worker sends its current push, which is applied, and ends.

  paceline drain runs/NAME 2 3
  paceline drain runs/NAME 2 --now   do not wait for its push: drop it like a lost worker, as if it hangs"""


def drain_verb(arguments: list[str]) -> int:
    parser = Parser("drain", DESCRIPTION)
    parser.add("run", "the folder of a running run, as in runs/NAME", metavar="RUN")
    parser.add("workers", "numbers of the workers to remove", nargs="+", type=int, metavar="WORKER")
    now = "drop them without their current push, like lost workers; on one machine their processes are killed"
    parser.add("--now", now, action="store_true")
    parsed = parser.parse_strictly(arguments)
    from paceline.runs.control_files import request_drain
    from paceline.runs.folder import RunFolder
    from paceline.settings.features import Feature
    from paceline.settings.strategies import require_feature

    folder = RunFolder.open(Path(parsed.run))
    require_feature(folder.config(), Feature.DRAIN, str(folder.path))
    if not folder.is_locked():
        raise UserError(f"{folder.path} is not running: there is no worker to drain")
    workers = tuple(dict.fromkeys(parsed.workers))
    if (odd := next((worker for worker in workers if not 0 <= worker < MAX_WORKERS), None)) is not None:
        raise UserError(f"worker {odd} does not exist: workers are numbered from 0, and 'paceline status' shows them")
    answer = request_drain(folder, workers, parsed.now)
    gone = [str(worker) for worker in workers if worker not in answer.refused and worker not in answer.staying]
    if gone:
        print(f"worker {' and '.join(gone)}: {'dropped' if parsed.now else 'drained'}; it has left the run")
    if answer.refused:
        raise UserError(
            "; ".join(f"worker {worker} cannot be drained: {why}" for worker, why in answer.refused.items())
        )
    if answer.staying:
        waits = "; ".join(f"worker {worker} has not answered ({why})" for worker, why in answer.staying.items())
        numbers = " ".join(map(str, answer.staying))
        drops = f"'paceline drain {parsed.run} {numbers} --now' drops it without its push"
        raise RunFailed(f"{waits}: it leaves after its current push; {drops}")
    return 0
