"""`paceline reproduce distml` and `mxnet`: published tables that are run for real, row by row."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.arguments import add_settings, number
from paceline.cli.output import parser_for
from paceline.cli.studies import write
from paceline.config import FIELDS
from paceline.errors import UserError
from paceline.reports.console import Console

HANDED_ON = ("precision", "compile", "capture", "channels_last", "accumulate", "threads", "seed", "warmup", "scale_lr")
DESCRIPTIONS = {
    "distml": """All-reduce data parallelism in JAX on Ray: ResNets on MNIST and a transformer on SST-5, 1 to 5 GPUs.

  paceline reproduce distml --rows resnet18 --steps 20 --data-dir DIR      a quick look at speed
  paceline reproduce distml --device cuda --precision bf16 --capture --data-dir DIR""",
    "mxnet": """A key-value store on ps-lite: inception nets on CIFAR-10 and ILSVRC12, alone, in step and free.

  paceline reproduce mxnet --rows cifar10 --steps 5 --data-dir DIR         a quick look
  paceline reproduce mxnet --rows "cifar10 async" --device cuda --data-dir DIR""",
}


def reproduce_for_real(table: str, arguments: list[str]) -> int:
    more = "\n\nRows that need what this machine lacks are listed with the reason; what is done is not run again."
    parser = parser_for(f"reproduce {table}", DESCRIPTIONS[table] + more, f"paceline reproduce {table} [flags]")
    parser.add_argument("--rows", help="numbers and ranges (1,4,7-9), or words of the names (resnet18 lm1) [all]")
    parser.add_argument("--epochs", type=number(float), help="instead of the published number")
    parser.add_argument("--steps", type=number(int), help="so many updates instead of epochs: a quick look")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what workers compute on [cpu]")
    parser.add_argument("--data-dir", metavar="DIR", help="folder that holds the data sets")
    parser.add_argument("--runs", metavar="DIR", default=f"runs/{table}", help=f"run folders go here [runs/{table}]")
    parser.add_argument("--strategy", metavar="NAME", help="for rows on several devices, instead of allreduce")
    add_settings(parser, left_out=tuple(name for name in FIELDS if name not in HANDED_ON))
    parsed = parser.parse_strictly(arguments)
    if (parsed.epochs is not None and not parsed.epochs > 0) or (parsed.steps is not None and parsed.steps < 1):
        raise UserError("--epochs and --steps must be above zero")
    if parsed.epochs is not None and parsed.steps is not None:
        raise UserError("--epochs and --steps both say how long: leave out one")
    if parsed.strategy is not None and table != "distml":
        raise UserError("--strategy is for distml: the rows of mxnet say how they keep pace")
    from paceline.config import RunConfig
    from paceline.launch import require_device
    from paceline.reports.tables import as_csv
    from paceline.studies.published.reproduce_real import run_rows
    from paceline.studies.published.rows import Asked, choose

    require_device(RunConfig(device=parsed.device))
    names = (*HANDED_ON, *(["strategy"] if table == "distml" else []))
    settings = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    asked = Asked(parsed.epochs, parsed.steps, parsed.device, parsed.data_dir, parsed.runs, settings)
    folder = Path(parsed.runs)
    with Console() as console:
        if table == "distml":
            from paceline.studies.published import distml, distml_table

            found = run_rows(choose(distml.published_rows(), parsed.rows), asked, console)
            text, rows = distml_table.markdown(found), distml_table.rows_of(found)
            files = {"log.md": distml_table.log(found)}
        else:
            from paceline.studies.published import mxnet, mxnet_table

            made = run_rows(choose(mxnet.published_rows(), parsed.rows), asked, console)
            text, rows, files = mxnet_table.markdown(made), mxnet_table.rows_of(made), {}
        folder.mkdir(parents=True, exist_ok=True)
        paths = write(folder, {"table.md": text, "table.csv": as_csv(rows), **files})
    print("\n".join([text, *paths]))
    return 0
