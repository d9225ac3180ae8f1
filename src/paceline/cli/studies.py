"""Verbs that run many settings and make one table of them: reproduce, sweep and bench."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paceline.cli.arguments import Parser, add_settings, config_from, number
from paceline.config import FIELDS, SIMULATED_ONLY
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.system.terminal import table_width

REPRODUCE_DESCRIPTION = """Repeat the runs of a published table, and show our results beside the published ones.

  paceline reproduce optml --device cuda --data-dir DIR                   parameter server; simulated, all rows at once
  paceline reproduce optml --rows "async lenet5" --seeds 3 --epochs 1
  paceline reproduce distml --rows resnet18 --steps 20 --data-dir DIR     all-reduce; real runs, one by one
  paceline reproduce mxnet --rows cifar10 --device cuda --data-dir DIR    key-value store; real runs, one by one"""

SWEEP_DESCRIPTION = """Run every combination of a grid of settings on simulated workers, and compare them in one table.

  paceline sweep examples/sweep.toml
  paceline sweep grid.toml --device cuda --data-dir DIR

The file has settings under [run] and lists of settings under [grid]; folds = 5 above them asks for cross-validation.
Runs that the lab supports are computed many at once, the others one by one. After a stop, the same command continues;
finished runs are not repeated."""

REAL_TABLES = ("distml", "mxnet")  # tables whose rows are trained on real processes; they have their own flags


def reproduce_verb(arguments: list[str]) -> int:
    if arguments and arguments[0] in REAL_TABLES:
        return reproduce_for_real(arguments[0], arguments[1:])
    parser = Parser("reproduce", REPRODUCE_DESCRIPTION, "paceline reproduce optml|distml|mxnet [flags]")
    parser.add_choice("table", ("optml", *REAL_TABLES), help="which published table")
    parser.add_argument("--rows", help="numbers and ranges (1,4,7-9), or words of the names (async cnn) [all]")
    parser.add_argument(
        "--seeds", type=number(int), default=1, help="number of runs of each row; the table shows mean and spread [1]"
    )
    parser.add_argument("--epochs", type=number(float), default=6.0, help="passes of each worker over its data [6]")
    parser.add_choice("--device", ("cpu", "cuda"), default="cpu", help="device; cuda computes all rows at once [cpu]")
    rule_help = "auto: run every row also with --rule auto, in a third column [plain]"
    parser.add_choice("--rule", ("plain", "auto"), default="plain", help=rule_help)
    parser.add_argument("--data-dir", metavar="DIR", help="folder that holds the data set")
    parser.add_argument(
        "--runs", metavar="DIR", default="runs/optml", help="folder for one run folder per row [runs/optml]"
    )
    parsed = parser.parse_strictly(arguments)
    if parsed.seeds < 1 or not parsed.epochs > 0:
        raise UserError(f"--seeds {parsed.seeds} --epochs {parsed.epochs:g}: both must be above zero")
    from paceline.studies.published.optml import choose_rows
    from paceline.studies.published.reproduce import as_csv, draw, markdown, reproduce, runs_as_csv, summary

    rows, folder = choose_rows(parsed.rows), Path(parsed.runs)
    with Console() as console:
        with_automatic = parsed.rule == "auto"
        where = (parsed.device, parsed.data_dir, folder, console)
        found = reproduce(rows, parsed.seeds, parsed.epochs, *where, with_automatic)
        table = markdown(found)
        made = write(folder, {"table.md": table, "table.csv": as_csv(found), "runs.csv": runs_as_csv(found)})
        why_not = draw(found, folder / "figure.png")
        if why_not is not None:
            console.note(why_not)
    print(table + "\n" + "\n".join([*summary(found), *made, *([] if why_not else [f"{folder}/figure.png"])]))
    return 0


def sweep_verb(arguments: list[str]) -> int:
    parser = Parser("sweep", SWEEP_DESCRIPTION, "paceline sweep FILE.toml [flags]")
    parser.add_argument("file", metavar="FILE.toml", help="file with the grid of settings")
    parser.add_choice("--device", ("cpu", "cuda"), default="cpu", help="device; cuda computes many runs at once [cpu]")
    parser.add_argument("--data-dir", metavar="DIR", help="folder that holds the data sets")
    parser.add_argument(
        "--runs", metavar="DIR", default="runs", help="folder in which the folder of the sweep is made [runs]"
    )
    parser.add_argument("--dry-run", action="store_true", help="check and list the runs, but run none")
    parser.add_argument("--yes", action="store_true", help="allow more than 1,000 runs")
    parser.add_argument("--json", action="store_true", help="print the table as JSON on standard output at the end")
    parsed = parser.parse_strictly(arguments)
    from paceline.studies.sweep_file import read_grid

    grid = read_grid(Path(parsed.file))
    folder = Path(parsed.runs) / grid.name
    from paceline.reports.tables import as_csv
    from paceline.studies import sweep_table
    from paceline.studies.batch_runs import is_done, why_not_in_lab
    from paceline.studies.sweep import prepare, sweep

    with Console() as console:
        configs = prepare(grid, folder, parsed.device, parsed.data_dir, parsed.yes, console)
        if parsed.dry_run:
            for config in configs:
                where = "simulated" if why_not_in_lab(config) else "in the lab"
                print(f"{folder}/{config.name}  {'done' if is_done(config) else where}")
            print(f"{len(configs)} runs")
            return 0
        results = sweep(grid, configs, folder, parsed.device, console)
        swept = sweep_table.gather(grid, results)
        rows = sweep_table.rows_of(swept)
        files = {
            "table.md": sweep_table.markdown(swept),
            "table.csv": as_csv(rows),
            "runs.csv": sweep_table.runs_as_csv(grid, configs, results),
        }
        made = write(folder, files)
        why_not = sweep_table.draw(grid, swept, folder / "figure.png")
        if why_not is not None:
            console.note(why_not)
    lines = [sweep_table.plain(swept, table_width()), "", *made, *([] if why_not else [f"{folder}/figure.png"])]
    print("\n".join([*lines, sweep_table.disposition(swept)]), file=sys.stderr if parsed.json else sys.stdout)
    if parsed.json:
        best = rows[0] if swept.best is not None else None
        found = {"folder": str(folder), "score": swept.score, "settings": rows, "best": best}
        print(json.dumps(found, indent=2))
    return 0


def write(folder: Path, files: dict[str, str]) -> list[str]:
    """Write the files; return their paths."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [f"{folder}/{name}" for name in files]


DESCRIPTION = """Measure the same run on 1, 2, 4, ... workers: samples/s, efficiency, and where the time goes.

  paceline bench scaling --strategy sync --model cnn --workers 1,2
  paceline bench scaling --kind strong --batch-size 128 --strategy async --repeats 3

Strong scaling divides a batch of --batch-size over all workers. Weak scaling gives each worker such a batch.
Each worker makes --steps steps [200]. All flags of 'paceline train' except --epochs work here.
After a stop, the same command continues."""


def bench_verb(arguments: list[str]) -> int:
    parser = Parser("bench", DESCRIPTION, "paceline bench scaling [flags]")
    parser.add_choice("benchmark", ("scaling",), help="what to measure")
    parser.add_choice("--kind", ("strong", "weak"), default="weak", help="strong or weak scaling [weak]")
    parser.add_argument(
        "--workers",
        dest="counts",
        metavar="N,N,...",
        help="numbers of workers, as in 1,2,4 (default: up to the number of cores)",
    )
    parser.add_argument(
        "--repeats",
        type=number(int),
        default=1,
        help="number of runs for each number of workers; the table shows the median [1]",
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON on standard output at the end")
    add_settings(parser, left_out=(*SIMULATED_ONLY, "workers", "epochs", "epoch_mode", "shard_weights", "score"))
    parsed = parser.parse_strictly(arguments)
    if parsed.repeats < 1:
        raise UserError(f"--repeats {parsed.repeats}: at least 1")
    from paceline.reports.tables import as_csv
    from paceline.studies import scaling_table
    from paceline.studies.scaling import measure, parse_counts

    asked = config_from(parsed, None)
    usual = f"scaling-{parsed.kind}-{asked.strategy.replace(':', '')}-{asked.model}"
    folder = Path(asked.runs) / (asked.name or usual)
    with Console() as console:
        counts = parse_counts(parsed.counts, asked.device)
        found = measure(asked, parsed.kind, counts, parsed.repeats, folder, console)
        rows = scaling_table.rows_of(found)
        files = {"table.md": scaling_table.markdown(found), "table.csv": as_csv(rows)}
        made = write(folder, files)
        why_not = scaling_table.draw(found, folder / "figure.png")
        if why_not is not None:
            console.note(why_not)
    made += [] if why_not else [f"{folder}/figure.png"]
    print(
        "\n".join([scaling_table.plain(found, table_width()), "", *made]),
        file=sys.stderr if parsed.json else sys.stdout,
    )
    if parsed.json:
        print(json.dumps({"folder": str(folder), "kind": found.kind, "counts": rows}, indent=2))
    return 0


HANDED_ON = ("precision", "compile", "capture", "channels_last", "accumulate", "threads", "seed", "warmup", "scale_lr")


DESCRIPTIONS = {
    "distml": """Repeat a table of all-reduce in JAX on Ray: ResNets on MNIST, a transformer on SST-5, 1 to 5 GPUs.

  paceline reproduce distml --rows resnet18 --steps 20 --data-dir DIR      a short run
  paceline reproduce distml --device cuda --precision bf16 --capture --data-dir DIR""",
    "mxnet": """Repeat a table of MXNet's key-value store: Inception on CIFAR-10 and ILSVRC12, sync and async.

  paceline reproduce mxnet --rows cifar10 --steps 5 --data-dir DIR         a short run
  paceline reproduce mxnet --rows "cifar10 async" --device cuda --data-dir DIR""",
}


def reproduce_for_real(table: str, arguments: list[str]) -> int:
    more = "\n\nRows that this machine cannot run are listed with the reason. Finished rows are not repeated."
    parser = Parser(f"reproduce {table}", DESCRIPTIONS[table] + more, f"paceline reproduce {table} [flags]")
    parser.add_argument("--rows", help="numbers and ranges (1,4,7-9), or words of the names (resnet18 lm1) [all]")
    parser.add_argument("--epochs", type=number(float), help="number of epochs [as published]")
    parser.add_argument("--steps", type=number(int), help="stop after this many updates instead of --epochs")
    parser.add_choice("--device", ("cpu", "cuda"), default="cpu", help="device of the workers [cpu]")
    parser.add_argument("--data-dir", metavar="DIR", help="folder that holds the data sets")
    parser.add_argument(
        "--runs", metavar="DIR", default=f"runs/{table}", help=f"folder for one run folder per row [runs/{table}]"
    )
    parser.add_argument("--strategy", metavar="NAME", help="strategy of rows on several devices [allreduce]")
    add_settings(parser, left_out=tuple(name for name in FIELDS if name not in HANDED_ON))
    parsed = parser.parse_strictly(arguments)
    if (parsed.epochs is not None and not parsed.epochs > 0) or (parsed.steps is not None and parsed.steps < 1):
        raise UserError("--epochs and --steps must be above zero")
    if parsed.epochs is not None and parsed.steps is not None:
        raise UserError("--epochs and --steps both say how long: leave out one")
    if parsed.strategy is not None and table != "distml":
        raise UserError("--strategy is for distml: the rows of mxnet say how they keep pace")
    from paceline.assembly.preflight import require_device
    from paceline.config import RunConfig
    from paceline.reports.tables import as_csv
    from paceline.studies.published.reproduce_real import run_rows
    from paceline.studies.published.rows import RowOptions, choose

    require_device(RunConfig(device=parsed.device))
    names = (*HANDED_ON, *(["strategy"] if table == "distml" else []))
    settings = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    asked = RowOptions(parsed.epochs, parsed.steps, parsed.device, parsed.data_dir, parsed.runs, settings)
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
