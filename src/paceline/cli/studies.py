"""Verbs that run many settings and make one table of them: reproduce, sweep and bench."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from paceline.cli.arguments import Parser, add_settings, config_from
from paceline.config import FIELDS, SIMULATED_ONLY
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.system.strict_json import to_json
from paceline.system.terminal import table_width

REPRODUCE_DESCRIPTION = """Repeat the runs of a published table, and show our results beside the published ones.

  paceline reproduce optml --device cuda --data-dir DIR                   parameter server; simulated, all rows at once
  paceline reproduce optml --rows "async lenet5" --seeds 3 --epochs 1
  paceline reproduce distml --rows resnet18 --steps 20 --data-dir DIR     all-reduce; real runs, one by one
  paceline reproduce mxnet --rows cifar10 --device cuda --data-dir DIR    key-value store; real runs, one by one
  paceline reproduce dana --device cuda --data-dir DIR                    ResNet-20, 4 to 32 workers; simulated"""
SWEEP_DESCRIPTION = """Run every combination of a grid of settings on simulated workers, and compare them in one table.

  paceline sweep examples/sweep.toml
  paceline sweep grid.toml --device cuda --data-dir DIR

The file has settings under [run] and lists of settings under [grid]; folds = 5 above them asks for cross-validation.

Runs that the lab supports are computed many at once, the others one by one.
After a stop, the same command continues."""

Draw = Callable[[Path], str | None]  # draws to a path; returns why it drew nothing, or None
REAL_TABLES = ("distml", "mxnet")  # tables whose rows are trained on real processes; they have their own flags


def reproduce_verb(arguments: list[str]) -> int:
    if arguments and arguments[0] in REAL_TABLES:
        return reproduce_for_real(arguments[0], arguments[1:])
    if arguments and arguments[0] == "dana":
        return reproduce_dana(arguments[1:])
    parser = Parser("reproduce", REPRODUCE_DESCRIPTION, "paceline reproduce optml|distml|mxnet|dana [flags]")
    parser.add_choice("table", ("optml", *REAL_TABLES, "dana"), "which published table")
    parser.add("--rows", "numbers and ranges (1,4,7-9), or words of the names (async cnn) [all]")
    parser.add("--seeds", "number of runs of each row; the table shows mean and spread [1]", type=int, default=1)
    parser.add("--epochs", "passes of each worker over its data [6]", type=float, default=6.0)
    parser.add_choice("--device", ("cpu", "cuda"), "device; cuda computes all rows at once [cpu]", default="cpu")
    rule = "auto: run every row also with --rule auto, in a third column [plain]"
    parser.add_choice("--rule", ("plain", "auto"), rule, default="plain")
    parser.add("--data-dir", "folder that holds the data set", metavar="DIR")
    parser.add("--runs", "folder for one run folder per row [runs/optml]", metavar="DIR", default="runs/optml")
    parsed = parser.parse_strictly(arguments)
    if parsed.seeds < 1 or not parsed.epochs > 0:
        raise UserError(f"--seeds {parsed.seeds} --epochs {parsed.epochs:g}: both must be above zero")
    from paceline.studies.published.optml import choose_rows
    from paceline.studies.published.reproduce import as_csv, draw, markdown, reproduce, runs_as_csv, summary

    rows, folder = choose_rows(parsed.rows), Path(parsed.runs)
    with Console() as console:
        options = (parsed.device, parsed.data_dir, folder, console, parsed.rule == "auto")
        found = reproduce(rows, parsed.seeds, parsed.epochs, *options)
        table = markdown(found)
        files = {"table.md": table, "table.csv": as_csv(found), "runs.csv": runs_as_csv(found)}
        made = _write(folder, files, console, lambda path: draw(found, path))
    print(table + "\n" + "\n".join([*summary(found), *made]))
    return 0


DANA_DESCRIPTION = """Repeat the CIFAR-10 table of the DANA paper: ResNet-20, 4 to 32 workers, simulated in the lab.

  paceline reproduce dana --device cuda --data-dir DIR --pause-after 540
  paceline reproduce dana --rows "auto 16" --seeds 5 --device cuda --data-dir DIR

Finished rows are not repeated. With --pause-after, the same command goes on where the last one stopped."""


def reproduce_dana(arguments: list[str]) -> int:
    parser = Parser("reproduce dana", DANA_DESCRIPTION, "paceline reproduce dana [flags]")
    parser.add("--rows", "numbers and ranges (1,4,7-9), or words of the names (auto 16) [all]")
    parser.add("--seeds", "number of runs of each row; the table shows mean and spread [1]", type=int, default=1)
    parser.add("--epochs", "number of epochs [160]", type=float)
    workers = "workers of about equal speed, or of speeds with a spread of .6 [homogeneous]"
    parser.add_choice("--speeds", ("homogeneous", "heterogeneous"), workers, default="homogeneous")
    parser.add_choice("--device", ("cpu", "cuda"), "device; cuda computes all rows at once [cpu]", default="cpu")
    pause = "keep the state of all runs after this many seconds and stop"
    parser.add("--pause-after", pause, type=float, metavar="SECONDS")
    parser.add("--data-dir", "folder that holds the data set", metavar="DIR")
    parser.add("--runs", "folder for one run folder per row [runs/dana]", metavar="DIR", default="runs/dana")
    parsed = parser.parse_strictly(arguments)
    if parsed.seeds < 1 or not (parsed.epochs is None or parsed.epochs > 0):
        raise UserError("--seeds and --epochs must be above zero")
    if parsed.pause_after is not None and not parsed.pause_after > 0:
        raise UserError(f"--pause-after {parsed.pause_after:g}: give a number of seconds above zero")
    from paceline.studies.published.dana import EPOCHS, choose_rows
    from paceline.studies.published.dana_table import RepeatOptions, markdown, repeat, table_csv

    folder = Path(parsed.runs)
    where = parsed.device, parsed.data_dir, folder, parsed.pause_after
    with Console() as console:
        options = RepeatOptions(parsed.seeds, parsed.epochs or EPOCHS, parsed.speeds, *where)
        found = repeat(choose_rows(parsed.rows), options, console)
        made = _write(folder, {"table.md": markdown(found), "table.csv": table_csv(found)}, console)
    print("\n".join([markdown(found), *made]))
    return 0


def sweep_verb(arguments: list[str]) -> int:
    parser = Parser("sweep", SWEEP_DESCRIPTION, "paceline sweep FILE.toml [flags]")
    parser.add("file", "file with the grid of settings", metavar="FILE.toml")
    parser.add_choice("--device", ("cpu", "cuda"), "device; cuda computes many runs at once [cpu]", default="cpu")
    parser.add("--data-dir", "folder that holds the data sets", metavar="DIR")
    parser.add("--runs", "folder in which the folder of the sweep is made [runs]", metavar="DIR", default="runs")
    parser.add("--dry-run", "check and list the runs, but run none", action="store_true")
    parser.add("--yes", "allow more than 1,000 runs", action="store_true")
    parser.add("--json", "print the table as JSON on standard output at the end", action="store_true")
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
        made = _write(folder, files, console, lambda path: sweep_table.draw(grid, swept, path))
    lines = [sweep_table.plain(swept, table_width()), "", *made, sweep_table.disposition(swept)]
    print("\n".join(lines), file=sys.stderr if parsed.json else sys.stdout)
    if parsed.json:
        best = rows[0] if swept.best is not None else None
        found = {"folder": str(folder), "score": swept.score, "chosen_on": swept.part, "settings": rows, "best": best}
        print(to_json(found, indent=2))
    return 0


def _write(folder: Path, files: dict[str, str], console: Console, draw: Draw = lambda _: "") -> list[str]:
    """Write the files, then draw the figure; return the paths of the files made."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    no_figure = draw(folder / "figure.png")
    if no_figure:
        console.note(no_figure)
    return [f"{folder}/{name}" for name in (*files, *(["figure.png"] if no_figure is None else []))]


DESCRIPTION = """Measure the same run on 1, 2, 4, ... workers: samples/s, efficiency, and where the time goes.

  paceline bench scaling --strategy sync --model cnn --workers 1,2
  paceline bench scaling --kind strong --batch-size 128 --strategy async --repeats 3

Strong scaling divides a batch of --batch-size over all workers. Weak scaling gives each worker such a batch.

Each worker makes --steps steps [200]. All flags of 'paceline train' except --epochs work here.

After a stop, the same command continues."""


def bench_verb(arguments: list[str]) -> int:
    parser = Parser("bench", DESCRIPTION, "paceline bench scaling [flags]")
    parser.add_choice("benchmark", ("scaling",), "what to measure")
    parser.add_choice("--kind", ("strong", "weak"), "strong or weak scaling [weak]", default="weak")
    counts = "numbers of workers, as in 1,2,4 (default: up to the number of cores)"
    parser.add("--workers", counts, dest="counts", metavar="N,N,...")
    repeats = "number of runs for each number of workers; the table shows the median [1]"
    parser.add("--repeats", repeats, type=int, default=1)
    parser.add("--json", "print the table as JSON on standard output at the end", action="store_true")
    add_settings(parser, left_out=(*SIMULATED_ONLY, "workers", "epochs", "epoch_mode", "shard_weights", "score"))
    parsed = parser.parse_strictly(arguments)
    if parsed.repeats < 1:
        raise UserError(f"--repeats {parsed.repeats}: at least 1")
    from paceline.reports.tables import as_csv
    from paceline.studies import scaling_table
    from paceline.studies.scaling import measure, parse_counts

    config = config_from(parsed, None)
    what = config.model if config.task is None else config.task.rpartition(":")[2]
    name = config.name or f"scaling-{parsed.kind}-{config.strategy.replace(':', '')}-{what}"
    folder = Path(config.runs) / name
    with Console() as console:
        found = measure(
            config, parsed.kind, parse_counts(parsed.counts, config.device), parsed.repeats, folder, console
        )
        rows = scaling_table.rows_of(found)
        files = {"table.md": scaling_table.markdown(found), "table.csv": as_csv(rows)}
        made = _write(folder, files, console, lambda path: scaling_table.draw(found, path))
    text = "\n".join([scaling_table.plain(found, table_width()), "", *made])
    print(text, file=sys.stderr if parsed.json else sys.stdout)
    if parsed.json:
        print(to_json({"folder": str(folder), "kind": found.kind, "counts": rows}, indent=2))
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
    parser.add("--rows", "numbers and ranges (1,4,7-9), or words of the names (resnet18 lm1) [all]")
    parser.add("--epochs", "number of epochs [as published]", type=float)
    parser.add("--steps", "stop after this many updates instead of --epochs", type=int)
    parser.add_choice("--device", ("cpu", "cuda"), "device of the workers [cpu]", default="cpu")
    parser.add("--data-dir", "folder that holds the data sets", metavar="DIR")
    parser.add("--runs", f"folder for one run folder per row [runs/{table}]", metavar="DIR", default=f"runs/{table}")
    parser.add("--strategy", "strategy of rows on several devices [allreduce]", metavar="NAME")
    add_settings(parser, left_out=tuple(name for name in FIELDS if name not in HANDED_ON))
    parsed = parser.parse_strictly(arguments)
    if (parsed.epochs is not None and not parsed.epochs > 0) or (parsed.steps is not None and parsed.steps < 1):
        raise UserError("--epochs and --steps must be above zero")
    if parsed.epochs is not None and parsed.steps is not None:
        raise UserError("--epochs and --steps both say how long: leave out one")
    if parsed.strategy is not None and table != "distml":
        raise UserError("--strategy is for distml: the rows of mxnet are sync or async as published")
    from paceline.assembly.preflight import require_device
    from paceline.config import RunConfig
    from paceline.reports.tables import as_csv
    from paceline.studies.published.reproduce_real import run_rows
    from paceline.studies.published.rows import RowOptions, choose

    require_device(RunConfig(device=parsed.device))
    names = (*HANDED_ON, *(["strategy"] if table == "distml" else []))
    settings = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    options = RowOptions(parsed.epochs, parsed.steps, parsed.device, parsed.data_dir, parsed.runs, settings)
    folder = Path(parsed.runs)
    with Console() as console:
        if table == "distml":
            from paceline.studies.published import distml, distml_table

            found = run_rows(choose(distml.published_rows(), parsed.rows), options, console)
            text, rows = distml_table.markdown(found), distml_table.rows_of(found)
            files = {"log.md": distml_table.log(found)}
        else:
            from paceline.studies.published import mxnet, mxnet_table

            ours = run_rows(choose(mxnet.published_rows(), parsed.rows), options, console)
            text, rows, files = mxnet_table.markdown(ours), mxnet_table.rows_of(ours), {}
        folder.mkdir(parents=True, exist_ok=True)
        made = _write(folder, {"table.md": text, "table.csv": as_csv(rows), **files}, console)
    print("\n".join([text, *made]))
    return 0
