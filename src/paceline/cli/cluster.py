"""Verbs of runs on several machines: one serves, the others work."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.arguments import Parser, add_settings, config_from, number
from paceline.cli.output import parser_for, show
from paceline.config import SIMULATED_ONLY, UPKEEP
from paceline.errors import UserError
from paceline.reports.console import Console

SERVER_DESCRIPTION = """Serve a run to workers that come over the network; everything about it is kept in its folder.

  paceline server --strategy async --workers 2                                 on this machine alone, no token
  paceline server --strategy sync --workers 8 --listen 0.0.0.0:29500           a token is made and shown once
  paceline server --resume runs/NAME                                           go on where its server ended"""
WORKER_DESCRIPTION = """Work for a server: it says what to train, the data is read here.

  paceline worker --connect 10.0.0.1:29500 --token-file token --data-dir DIR
  PACELINE_TOKEN=... paceline worker --connect 10.0.0.1:29500 --threads 4"""
SHARD_DESCRIPTION = """Hold a part of the weights for 'paceline server --servers S --shards-elsewhere'.

  paceline shard --connect 10.0.0.1:29500 --token-file token"""
PATIENCE_SECONDS = 300.0


def server_verb(arguments: list[str]) -> int:
    parser = parser_for("server", SERVER_DESCRIPTION, "paceline server [RUN.toml] [flags]")
    parser.add_argument("file", nargs="?", metavar="RUN.toml", help="a file of settings; flags win over it")
    door = parser.add_argument_group("door")
    door.add_argument("--listen", metavar="HOST:PORT", help="where workers find it [127.0.0.1 and a free port]")
    door.add_argument("--token-file", metavar="FILE", help="what workers must know [PACELINE_TOKEN, or made anew]")
    door.add_argument("--tls", action="store_true", help="encrypt; the certificate's fingerprint is shown")
    door.add_argument("--certificate", metavar="FILE", help="your own, with --key [made anew]")
    door.add_argument("--key", metavar="FILE", help="of the certificate")
    door.add_argument(
        "--servers", type=number(int), metavar="S",
        help="cut the weights into S ranges, each with a process of its own [1, or as before]",
    )  # fmt: skip
    door.add_argument(
        "--shards-elsewhere", action="store_true", help="wait for S - 1 'paceline shard' instead of starting them here"
    )
    door.add_argument(
        "--wait", type=number(float), metavar="SECONDS",
        help="give up, with exit code 1, when not all workers have come by then [wait for ever]",
    )  # fmt: skip
    door.add_argument("--resume", metavar="RUN", help="go on with a run whose server ended, at the same address")
    add_settings(parser, left_out=(*SIMULATED_ONLY, "faults", "device"))
    parser.add_argument("--json", action="store_true", help="print result.json on standard output, last")
    parsed = parser.parse_strictly(arguments)
    from paceline.runtimes.cluster.serve import Entrance, serve, serve_again

    if (parsed.certificate is None) != (parsed.key is None):
        raise UserError("--certificate and --key belong together: give both, or none and one is made")
    tls = parsed.tls or parsed.certificate is not None
    files = parsed.certificate, parsed.key
    if parsed.wait is not None and parsed.wait <= 0:
        raise UserError(f"--wait {parsed.wait:g}: give the seconds to wait for all workers, as in --wait 600")
    others = parsed.servers, parsed.shards_elsewhere
    entrance = Entrance(parsed.listen, parsed.token_file, tls, *files, *others, parsed.wait)
    with Console() as console:
        if parsed.resume is not None:
            upkeep = {name: getattr(parsed, name) for name in UPKEEP if getattr(parsed, name) is not None}
            folder, result = serve_again(Path(parsed.resume), entrance, console, upkeep=upkeep)
        else:
            folder, result = serve(config_from(parsed, parsed.file), entrance, console)
    return show(folder, result, parsed.json)


def add_proof(parser: Parser) -> None:
    """What a server is shown, and what it must show."""
    parser.add_argument("--token-file", metavar="FILE", help="the server's token [PACELINE_TOKEN]")
    parser.add_argument("--tls", action="store_true", help="encrypt; the token vouches for the server's certificate")
    parser.add_argument("--fingerprint", metavar="HEX", help="of the server's certificate: speak TLS with it alone")
    parser.add_argument("--ca", metavar="FILE", help="speak TLS with a server whose certificate this one signed")


def _add_way(parser: Parser) -> None:
    """How to reach a server."""
    parser.add_argument("--connect", metavar="HOST:PORT", required=True, help="where the server is")
    add_proof(parser)
    parser.add_argument(
        "--patience", type=number(float), default=PATIENCE_SECONDS, metavar="S",
        help="seconds to go on trying while the server cannot be reached [%(default)g]",
    )  # fmt: skip


def shard_verb(arguments: list[str]) -> int:
    parser = parser_for("shard", SHARD_DESCRIPTION, "paceline shard --connect HOST:PORT [flags]")
    _add_way(parser)
    parser.add_argument("--listen", metavar="HOST:PORT", help="where workers find it [as the server is reached]")
    parser.add_argument("--once", action="store_true", help="end when the server goes away: do not wait for its return")
    parsed = parser.parse_strictly(arguments)
    from paceline.runtimes.cluster.serve import join_as_shard
    from paceline.transports.auth import ConnectOptions

    listen, once = vars(parsed).pop("listen"), vars(parsed).pop("once")
    with Console() as console:
        return 0 if join_as_shard(ConnectOptions(**vars(parsed)), listen, once, console) else 1


def worker_verb(arguments: list[str]) -> int:
    parser = parser_for("worker", WORKER_DESCRIPTION, "paceline worker --connect HOST:PORT [flags]")
    _add_way(parser)
    parser.add_argument("--data-dir", metavar="DIR", help="folder that holds the data set on this machine")
    parser.add_argument("--threads", type=number(int), metavar="N", help="threads of this worker [all cores]")
    parser.add_argument(
        "--device", metavar="NAME", default="cpu",
        help="cuda, or one of several as in cuda:1; the server then needs --recovery checkpoint [%(default)s]",
    )  # fmt: skip
    parser.add_argument("--worker", type=number(int), metavar="N", help="which worker to be [any that is missing]")
    parser.add_argument(
        "--overlap", type=number(int), default=0, metavar="D",
        help="be D + 1 of the run's workers: while one's push is under way the next computes [%(default)s]",
    )  # fmt: skip
    parsed = parser.parse_strictly(arguments)
    from paceline.runtimes.cluster.serve import join_server
    from paceline.transports.auth import ConnectOptions

    visitor = ConnectOptions(**vars(parsed))
    with Console() as console:
        ended = join_server(visitor, console)
    return 0 if ended else 1


DESCRIPTION = """Have workers leave a run that is going on: each finishes its push, which counts, and goes.

  paceline drain runs/NAME 2 3"""


def drain_verb(arguments: list[str]) -> int:
    parser = parser_for("drain", DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="the folder of a run that is going on, as in runs/NAME")
    parser.add_argument("workers", nargs="+", type=number(int), metavar="WORKER", help="numbers of workers")
    parsed = parser.parse_strictly(arguments)
    from paceline.runs.control_files import request_drain
    from paceline.runs.folder import RunFolder
    from paceline.settings.strategies import on_ring

    folder = RunFolder.open(Path(parsed.run))
    config = folder.config()
    if on_ring(config):
        raise UserError(f"{folder.path} is a ring ({config.strategy}), which nobody leaves: stop it, or let it finish")
    if not folder.is_locked():
        raise UserError(f"{folder.path} is not being trained now: there is nobody to drain")
    workers = tuple(dict.fromkeys(parsed.workers))
    refused = request_drain(folder, workers)
    drained = [str(worker) for worker in workers if worker not in refused]
    if drained:
        print(f"worker {' and '.join(drained)}: drained, to leave after the push being made")
    if refused:
        raise UserError("; ".join(f"worker {worker} cannot be drained: {why}" for worker, why in refused.items()))
    return 0
