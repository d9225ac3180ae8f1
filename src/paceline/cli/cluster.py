"""Verbs of runs on several machines: serve a run, work for a server, hold a shard, drain workers."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.arguments import Parser, add_settings, config_from, number
from paceline.cli.output import show
from paceline.config import SIMULATED_ONLY, UPKEEP
from paceline.errors import UserError
from paceline.reports.console import Console

SERVER_DESCRIPTION = """Serve a run to workers on other machines; the run folder stays here.

  paceline server --strategy async --workers 2                         for workers on this machine, without a token
  paceline server --strategy sync --workers 8 --listen 0.0.0.0:29500   for other machines; prints a new token once
  paceline server --resume runs/NAME                                   continue after the server ended"""
WORKER_DESCRIPTION = """Connect a worker to a server, which sends the settings. The data is read on this machine.

  paceline worker --connect 10.0.0.1:29500 --token-file token --data-dir DIR
  PACELINE_TOKEN=... paceline worker --connect 10.0.0.1:29500 --threads 4"""
SHARD_DESCRIPTION = """Hold a range of the weights for 'paceline server --servers S --shards-elsewhere'.

  paceline shard --connect 10.0.0.1:29500 --token-file token"""
PATIENCE_SECONDS = 300.0


def server_verb(arguments: list[str]) -> int:
    parser = Parser("server", SERVER_DESCRIPTION, "paceline server [RUN.toml] [flags]")
    parser.add_argument("file", nargs="?", metavar="RUN.toml", help="file of settings; flags override it")
    parser.add_to("network", "--listen", metavar="HOST:PORT", help="address for workers [127.0.0.1 and a free port]")
    parser.add_to(
        "network", "--token-file", metavar="FILE", help="file with the token of the run [PACELINE_TOKEN, or a new one]"
    )
    parser.add_to("network", "--tls", action="store_true", help="encrypt, and show the fingerprint of the certificate")
    parser.add_to("network", "--certificate", metavar="FILE", help="TLS certificate; needs --key [a new one]")
    parser.add_to("network", "--key", metavar="FILE", help="private key of --certificate")
    parser.add_to(
        "network", "--servers", type=number(int), metavar="S",
        help="divide the weights over S server processes [1; with --resume: as before]",
    )  # fmt: skip
    parser.add_to(
        "network",
        "--shards-elsewhere",
        action="store_true",
        help="wait for S - 1 'paceline shard' commands instead of starting processes here",
    )
    parser.add_to(
        "network", "--wait", type=number(float), metavar="SECONDS",
        help="exit with code 1 if not all workers have connected by then [no limit]",
    )  # fmt: skip
    parser.add_to("network", "--resume", metavar="RUN", help="continue a run whose server ended, at the same address")
    add_settings(parser, left_out=(*SIMULATED_ONLY, "faults", "device"))
    parser.add_argument("--json", action="store_true", help="print result.json on standard output at the end")
    parsed = parser.parse_strictly(arguments)
    from paceline.runtimes.cluster.serve import ListenOptions, serve, serve_again

    if (parsed.certificate is None) != (parsed.key is None):
        raise UserError("--certificate and --key belong together: give both, or none and one is made")
    tls = parsed.tls or parsed.certificate is not None
    files = parsed.certificate, parsed.key
    if parsed.wait is not None and parsed.wait <= 0:
        raise UserError(f"--wait {parsed.wait:g}: give the seconds to wait for all workers, as in --wait 600")
    others = parsed.servers, parsed.shards_elsewhere
    entrance = ListenOptions(parsed.listen, parsed.token_file, tls, *files, *others, parsed.wait)
    with Console() as console:
        if parsed.resume is not None:
            upkeep = {name: getattr(parsed, name) for name in UPKEEP if getattr(parsed, name) is not None}
            folder, result = serve_again(Path(parsed.resume), entrance, console, upkeep=upkeep)
        else:
            folder, result = serve(config_from(parsed, parsed.file), entrance, console)
    return show(folder, result, parsed.json)


def add_proof(parser: Parser) -> None:
    """Add the flags that authenticate a client to a server, and the server to the client."""
    parser.add_argument("--token-file", metavar="FILE", help="file with the token of the server [PACELINE_TOKEN]")
    parser.add_argument(
        "--tls", action="store_true", help="encrypt; the token authenticates the certificate of the server"
    )
    parser.add_argument(
        "--fingerprint", metavar="HEX", help="use TLS, and accept only the certificate with this fingerprint"
    )
    parser.add_argument("--ca", metavar="FILE", help="use TLS, and accept only certificates that this one signed")


def _add_way(parser: Parser) -> None:
    """Add the flags that say how to reach a server."""
    parser.add_argument("--connect", metavar="HOST:PORT", required=True, help="address of the server")
    add_proof(parser)
    parser.add_argument(
        "--patience", type=number(float), default=PATIENCE_SECONDS, metavar="S",
        help="seconds to retry while the server cannot be reached [%(default)g]",
    )  # fmt: skip


def shard_verb(arguments: list[str]) -> int:
    parser = Parser("shard", SHARD_DESCRIPTION, "paceline shard --connect HOST:PORT [flags]")
    _add_way(parser)
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="address for workers [the interface that reaches the server]"
    )
    parser.add_argument(
        "--once", action="store_true", help="end when the server is gone, instead of waiting until it is back"
    )
    parsed = parser.parse_strictly(arguments)
    from paceline.runtimes.cluster.serve import join_as_shard
    from paceline.transports.auth import ConnectOptions

    listen, once = vars(parsed).pop("listen"), vars(parsed).pop("once")
    with Console() as console:
        return 0 if join_as_shard(ConnectOptions(**vars(parsed)), listen, once, console) else 1


def worker_verb(arguments: list[str]) -> int:
    parser = Parser("worker", WORKER_DESCRIPTION, "paceline worker --connect HOST:PORT [flags]")
    _add_way(parser)
    parser.add_argument("--data-dir", metavar="DIR", help="folder that holds the data set on this machine")
    parser.add_argument("--threads", type=number(int), metavar="N", help="threads of this worker [all cores]")
    parser.add_argument(
        "--device", metavar="NAME", default="cpu",
        help="cpu, cuda or cuda:N; with cuda the server needs --recovery checkpoint [%(default)s]",
    )  # fmt: skip
    parser.add_argument("--worker", type=number(int), metavar="N", help="number of this worker [any free number]")
    parser.add_argument(
        "--overlap", type=number(int), default=0, metavar="D",
        help="run D + 1 workers in this process: one computes while the push of another travels [%(default)s]",
    )  # fmt: skip
    parsed = parser.parse_strictly(arguments)
    from paceline.runtimes.cluster.serve import join_server
    from paceline.transports.auth import ConnectOptions

    visitor = ConnectOptions(**vars(parsed))
    with Console() as console:
        ended = join_server(visitor, console)
    return 0 if ended else 1


DESCRIPTION = """Remove workers from a running run. Each worker sends its current push, which is applied, and ends.

  paceline drain runs/NAME 2 3"""


def drain_verb(arguments: list[str]) -> int:
    parser = Parser("drain", DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="the folder of a running run, as in runs/NAME")
    parser.add_argument(
        "workers", nargs="+", type=number(int), metavar="WORKER", help="numbers of the workers to remove"
    )
    parsed = parser.parse_strictly(arguments)
    from paceline.runs.control_files import request_drain
    from paceline.runs.folder import RunFolder
    from paceline.settings.strategies import Feature, require_feature

    folder = RunFolder.open(Path(parsed.run))
    config = folder.config()
    require_feature(config, Feature.DRAIN, str(folder.path))
    if not folder.is_locked():
        raise UserError(f"{folder.path} is not running: there is no worker to drain")
    workers = tuple(dict.fromkeys(parsed.workers))
    refused = request_drain(folder, workers)
    drained = [str(worker) for worker in workers if worker not in refused]
    if drained:
        print(f"worker {' and '.join(drained)}: drained; it leaves after its current push")
    if refused:
        raise UserError("; ".join(f"worker {worker} cannot be drained: {why}" for worker, why in refused.items()))
    return 0
