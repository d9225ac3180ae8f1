"""The public programs of adoption.py: how to run each, its metric, and the lines that adopt Paceline.

Nothing of the programs is here but the lines (anchors) beside which ours are inserted.
"""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MAX_LINES = 6
IMPORT, JOIN = "import paceline", "session = paceline.join()"
FINISH_IN_LAST_EPOCH = "if epoch == args.epochs: session.finish()"


@dataclass(frozen=True)
class Insert:
    """Lines added after or before the only line of the script whose stripped text is `anchor`."""

    anchor: str
    lines: tuple[str, ...]
    before: bool = False
    indent: int | None = None
    """Spaces before the lines (default: as many as before the anchor)."""


@dataclass(frozen=True)
class Program:
    """One public program. `arguments` is a template of `seed`, `batch`, `length`, `half` (of length) and `samples`."""

    folder: str
    script: str
    arguments: str
    batch: int
    length: int
    quick_length: int
    inserts: tuple[Insert, ...]
    metric: str
    """Regular expression of the metric in what the program prints; the last match of each process counts."""
    unit: str
    value: Callable[[float], float] = float
    higher_is_better: bool = False
    halves: bool = True
    """Whether `length` counts steps, halved at twice the batch and on two workers, and not passes over the data."""
    speed_arguments: str = ""
    """Appended when speed is measured: it never ends by itself, and evaluates seldom."""
    at_most: float | None = None
    """Absolute bar of two asynchronous workers."""
    seed_text: str | None = None
    """Text of the script that is replaced by the seed, if no argument sets it."""
    setup: Callable[[Path], None] | None = None
    packages: tuple[tuple[str, str], ...] = ()
    """Modules it imports, and the package of each."""

    @property
    def num_added(self) -> int:
        return sum(len(insert.lines) for insert in self.inserts)

    def command(self, seed: int, *, double: bool = False, workers: int = 1, quick: bool = False) -> list[str]:
        """Return the script and its arguments; every variant trains on as many samples."""
        total = self.quick_length if quick else self.length
        length = total // 2 if self.halves and (double or workers > 1) else total
        batch = self.batch * (2 if double else 1)
        words = {"seed": seed, "batch": batch, "length": length, "half": length // 2, "samples": total * self.batch}
        return [self.script, *self.arguments.format(**words, last=length + 1).split()]

    def metric_in(self, text: str) -> float | None:
        """Return the last metric that a process printed, or None."""
        found = re.findall(self.metric, text)
        return self.value(float(found[-1])) if found else None

    def missing(self, source: Path) -> list[str]:
        """Return the packages that must be installed first; a folder in `source`/stand-in replaces one."""
        needed = [(module, name) for module, name in self.packages if not (source / "stand-in" / module).is_dir()]
        return [name for module, name in needed if importlib.util.find_spec(module) is None]


def insert(source: str, inserts: tuple[Insert, ...]) -> str:
    """Return the source with the lines of `inserts` added.

    >>> insert("if x:\\n    a = 1\\n", (Insert("a = 1", ("b = 2",)), Insert("a = 1", ("c",), indent=0)))
    'if x:\\n    a = 1\\n    b = 2\\nc\\n'
    """
    lines = source.splitlines()
    places: list[tuple[int, list[str]]] = []
    for added in inserts:
        found = [number for number, line in enumerate(lines) if line.strip() == added.anchor]
        if len(found) != 1:
            raise RuntimeError(f"{len(found)} lines of the program are {added.anchor!r}: one was expected")
        line = lines[found[0]]
        indent = len(line) - len(line.lstrip()) if added.indent is None else added.indent
        places.append((found[0] + (not added.before), [" " * indent + text for text in added.lines]))
    for place, texts in reversed(sorted(places, key=lambda added: added[0])):
        lines[place:place] = texts
    return "\n".join(lines) + "\n"


def _prepare_shakespeare(folder: Path) -> None:
    command = [sys.executable, "data/shakespeare_char/prepare.py"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def _divide_wikitext(folder: Path) -> None:
    """Train on the validation text; validate and test on an eighth each of the test text."""
    texts = folder / "data/wikitext-2"
    shutil.copy(texts / "valid.txt", texts / "train.txt")
    lines = (texts / "test.txt").read_text(encoding="utf8").splitlines(keepends=True)
    eighth = len(lines) // 8
    (texts / "valid.txt").write_text("".join(lines[:eighth]), encoding="utf8")
    (texts / "test.txt").write_text("".join(lines[eighth : 2 * eighth]), encoding="utf8")


def _make_results_folder(folder: Path) -> None:
    (folder / "results").mkdir(exist_ok=True)


_IMAGES = (("torchvision", "torchvision"), ("PIL", "pillow"))
_TENSORBOARD = ("tensorboard", "tensorboard")

PROGRAMS = {
    "mnist": Program(
        folder="pytorch-examples/mnist",
        script="main.py",
        arguments="--no-accel --epochs {length} --batch-size {batch} --seed {seed}",
        batch=64,
        length=1,
        quick_length=1,
        halves=False,
        inserts=(
            Insert("import torch", (IMPORT,), before=True),
            Insert(
                "scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)",
                (
                    JOIN,
                    "model, optimizer, scheduler, train_loader = "
                    "session.prepare(model, optimizer, scheduler, train_loader)",
                ),
            ),
            Insert("test(model, device, test_loader)", (FINISH_IN_LAST_EPOCH,), before=True),
        ),
        speed_arguments="--epochs 1000",
        metric=r"Accuracy: (\d+)/10000",
        unit="test accuracy, %",
        value=lambda correct: correct / 100.0,
        higher_is_better=True,
        packages=_IMAGES,
    ),
    "vae": Program(
        folder="pytorch-examples/vae",
        script="main.py",
        arguments="--no-accel --epochs {length} --batch-size {batch} --seed {seed}",
        batch=128,
        length=2,
        quick_length=1,
        halves=False,
        inserts=(
            Insert("import torch", (IMPORT,), before=True),
            Insert(
                "optimizer = optim.Adam(model.parameters(), lr=1e-3)",
                (JOIN, "model, optimizer, train_loader = session.prepare(model, optimizer, train_loader)"),
            ),
            Insert("test(epoch)", (FINISH_IN_LAST_EPOCH,), before=True),
        ),
        speed_arguments="--epochs 1000",
        metric=r"Test set loss: ([\d.]+)",
        unit="test loss",
        setup=_make_results_folder,
        packages=_IMAGES,
    ),
    "wordlm": Program(
        folder="pytorch-examples/word_language_model",
        script="main.py",
        arguments="--use-optimizer --lr 2e-3 --emsize 64 --nhid 64"
        " --epochs {length} --batch_size {batch} --seed {seed}",
        batch=20,
        length=1,
        quick_length=1,
        halves=False,
        inserts=(
            Insert("import torch", (IMPORT,), before=True),
            Insert("args = parser.parse_args()", (JOIN, 'args.save = f"model-{session.worker}.pt"')),
            Insert("train_data = batchify(corpus.train, args.batch_size)", ("train_data = session.split(train_data)",)),
            Insert(
                "optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)",
                ("model, optimizer = session.prepare(model, optimizer)",),
            ),
            Insert("val_loss = evaluate(val_data)", (FINISH_IN_LAST_EPOCH,), before=True),
        ),
        speed_arguments="--epochs 1000",
        metric=r"End of training .* test ppl +([\d.]+)",
        unit="test loss, ln ppl",
        value=math.log,
        setup=_divide_wikitext,
    ),
    "nanogpt": Program(
        folder="nanogpt",
        script="train.py",
        arguments="config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=100"
        " --eval_interval={half} --log_interval=50 --block_size=64 --batch_size={batch}"
        " --n_layer=4 --n_head=4 --n_embd=128 --max_iters={length} --lr_decay_iters={length} --dropout=0.0",
        batch=12,
        length=2000,
        quick_length=400,
        inserts=(
            Insert("import torch", (IMPORT,), before=True),
            Insert(
                "tokens_per_iter = gradient_accumulation_steps * ddp_world_size * batch_size * block_size",
                (JOIN, "master_process = session.is_main"),
            ),
            Insert(
                "# helps estimate an arbitrarily accurate loss over either split using many batches",
                ("model, optimizer = session.prepare(model, optimizer)",),
                before=True,
            ),
            Insert(
                "destroy_process_group()",
                ("session.finish()", """print(f"at the end: val loss {estimate_loss()['val']:.4f}")"""),
                indent=0,
            ),
        ),
        metric=r"val loss ([\d.]+)",
        unit="validation loss",
        at_most=1.93,
        speed_arguments="--eval_iters=1 --eval_interval=1000000 --max_iters=1000000 --lr_decay_iters=1000000",
        seed_text="1337",
        setup=_prepare_shakespeare,
        packages=(("requests", "requests"),),
    ),
    "makemore": Program(
        folder="makemore",
        script="makemore.py",
        arguments="-i names.txt -o out --num-workers 0 --batch-size {batch} --max-steps {last} --seed {seed}",
        batch=32,
        length=2000,
        quick_length=1000,
        inserts=(
            Insert("import torch", (IMPORT,), before=True),
            Insert("args = parser.parse_args()", (JOIN, 'args.work_dir += f"-{session.worker}"')),
            Insert(
                "# training loop",
                (
                    "model, optimizer, batch_loader.train_loader = "
                    "session.prepare(model, optimizer, batch_loader.train_loader)",
                    "batch_loader.data_iter = iter(batch_loader.train_loader)",
                ),
                before=True,
            ),
            Insert("# evaluate the model", ("if step == args.max_steps - 1: session.finish()",), before=True),
        ),
        speed_arguments="--max-steps 1000000",
        metric=r"step \d+ train loss: [\d.]+ test loss: ([\d.]+)",
        unit="test loss",
        packages=(_TENSORBOARD,),
    ),
    "dlrm": Program(
        folder="dlrm",
        script="dlrm_s_pytorch.py",
        arguments="--arch-sparse-feature-size=16 --arch-embedding-size=1000-1000-1000-1000 --arch-mlp-bot=13-64-16"
        " --arch-mlp-top=64-1 --loss-function=bce --round-targets=True --learning-rate=0.1 --data-size={samples}"
        " --mini-batch-size={batch} --print-freq={half} --numpy-rand-seed={seed}",
        batch=125,
        length=160,
        quick_length=40,
        inserts=(
            Insert("import torch", (IMPORT,), before=True),
            Insert(
                "### main loop ###",
                (
                    JOIN,
                    "dlrm, optimizer, lr_scheduler, train_ld = "
                    "session.prepare(dlrm, optimizer, lr_scheduler, train_ld)",
                ),
                before=True,
            ),
            Insert("# profiling", ("session.finish()",), before=True),
        ),
        speed_arguments="--data-size=10000000",
        metric=r"Finished training .* loss ([\d.]+)",
        unit="loss, 2nd half",
        packages=(("sklearn", "scikit-learn"), ("tqdm", "tqdm"), _TENSORBOARD),
    ),
}
