"""The verb that asks workers of a running run to leave."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.arguments import number
from paceline.cli.output import parser_for
from paceline.errors import UserError

DESCRIPTION = """Have workers leave a run that is going on: each finishes its push, which counts, and goes.

  paceline drain runs/NAME 2 3"""


def drain_verb(arguments: list[str]) -> int:
    parser = parser_for("drain", DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="the folder of a run that is going on, as in runs/NAME")
    parser.add_argument("workers", nargs="+", type=number(int), metavar="WORKER", help="numbers of workers")
    parsed = parser.parse_strictly(arguments)
    from paceline.runs.control_files import ask_to_drain
    from paceline.runs.folder import RunFolder
    from paceline.settings.strategies import on_ring

    folder = RunFolder.open(Path(parsed.run))
    config = folder.config()
    if on_ring(config):
        raise UserError(f"{folder.path} is a ring ({config.strategy}), which nobody leaves: stop it, or let it finish")
    if not folder.is_locked():
        raise UserError(f"{folder.path} is not being trained now: there is nobody to drain")
    workers = tuple(dict.fromkeys(parsed.workers))
    refused = ask_to_drain(folder, workers)
    drained = [str(worker) for worker in workers if worker not in refused]
    if drained:
        print(f"worker {' and '.join(drained)}: drained, to leave after the push being made")
    if refused:
        raise UserError("; ".join(f"worker {worker} cannot be drained: {why}" for worker, why in refused.items()))
    return 0
