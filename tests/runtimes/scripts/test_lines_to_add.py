"""`paceline run` of a script without Paceline starts nothing, and shows the lines to add, with its names."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.errors import UserError
from paceline.runtimes.scripts.lines_to_add.message import AddedLine, apply_lines, lines_for, require_paceline
from paceline.runtimes.scripts.lines_to_add.modules import read_script, with_helpers
from paceline.runtimes.scripts.lines_to_add.roles import find_roles
from paceline.runtimes.scripts.lines_to_add.variables import Usage

STEP = """
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""
FLAT = f"""import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data)
test_loader = DataLoader(test_data)
{STEP.strip()}
for x, y in test_loader:
    model(x)
"""
CALLEE = """import torch


def fit(network, batches, opt):
    network.train()
    for x, y in enumerate(batches):
        opt.zero_grad()
        network(x).backward()
        opt.step()


def score(network, batches):
    with torch.no_grad():
        for x, y in batches:
            network(x)


def main():
    train_loader, test_loader = make_loaders()
    net = Net()
    optim = build_optimizer(net)
    if warm:
        schedule = torch.optim.lr_scheduler.StepLR(optim, 1)
    else:
        schedule = torch.optim.lr_scheduler.ConstantLR(optim)
    for epoch in range(3):
        fit(net, train_loader, opt=optim)
        score(net, test_loader)
        schedule.step()
    score(net, test_loader)


if __name__ == "__main__":
    main()
"""
GLOBAL = """import torch

train_loader = torch.utils.data.DataLoader(data)
model = VAE()
optimizer = torch.optim.Adam(model.parameters())


def train(epoch):
    model.train()
    for batch in train_loader:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()


if __name__ == "__main__":
    for epoch in range(3):
        train(epoch)
"""
GAN = """from torch import optim
from torch.utils.data import DataLoader

loader = DataLoader(data)
generator = Generator()
critic = Critic()
opt_c = optim.Adam(critic.parameters())
opt_g = optim.Adam(generator.parameters())
for i, real in enumerate(loader):
    critic.zero_grad()
    critic(real).backward()
    opt_c.step()
    generator.zero_grad()
    critic(generator(noise)).backward()
    opt_g.step()
"""
NO_LOADER = """import torch

model = make()
optimizer = model.configure_optimizers(0.1)
if compile:
    model = torch.compile(model)
while True:
    at = torch.randint(100, (4,))
    model(data[at]).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()
    if done():
        break
print(model)
"""
IN_ORDER = """import torch

inputs = torch.arange(100)
targets = inputs + 1
n = len(inputs)
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(0, n, 8):
    optimizer.zero_grad()
    loss(model(inputs[i : i + 8]), targets[i : i + 8]).backward()
    optimizer.step()
"""
SHUFFLED = IN_ORDER.replace("for i", "order = torch.randperm(n)\nfor i").replace("i : i + 8", "order[i : i + 8]")
CONDITIONAL = """import torch

model = make()
if train:
    optimizers = {"sgd": torch.optim.SGD}
    optimizer = optimizers[name](model.parameters(), lr=0.1)
if not train:
    model = quantize(model)
with profiler():
    if train:
        for batch in batches():
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
    else:
        test()
"""
CLASS = """import torch


class Trainer:
    def __init__(self, network, opt, batches):
        self.network, self.opt, self.batches = network, opt, batches

    def fit(self):
        for batch in self.batches:
            self.opt.zero_grad()
            self.network(batch).backward()
            self.opt.step()


model = make()
optimizer = make_optimizer(model.parameters())
loader = make_loader()
trainer = Trainer(model, optimizer, loader)
trainer.fit()
"""
WRAPPED = """import torch


class Endless:
    def __init__(self, data):
        self.loader = torch.utils.data.DataLoader(data, SHUFFLE)

    def next(self):
        return next(iter(self.loader))


model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = Endless(data)
while True:
    model(batches.next()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if done():
        break
"""
BY_HAND = """import torch

model = make()
for x in data:
    model(x).backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
"""
GUARDED = """import torch


def step_once(net, opt, x):
    opt.zero_grad()
    net(x).backward()
    opt.step()


if __name__ == "__main__":
    net = Net()
    opt = torch.optim.Adam(net.parameters())
    for epoch in range(9):
        step_once(net, opt, x)
    print(net)
"""
CALLED_NEXT = """import torch

loader = DataLoader(data)
model = Net()
optimizer = torch.optim.RMSprop(model.parameters())
for epoch in range(9):
    batches = iter(loader)
    i = 0
    while i < len(loader):
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)
        x = next(batches)
        i += 1
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
TRAINER = """import torch


class Trainer:
    def __init__(self, model, batches, optimizer, device):
        self.model = model.to(device)
        self.batches, self.optimizer = batches, optimizer

    def train(self, epochs):
        for epoch in range(epochs):
            for x, y in self.batches:
                self.optimizer.zero_grad()
                self.model(x).backward()
                self.optimizer.step()


def main():
    rows, model, optimizer = build()
    batches = make_loader(rows)
    trainer = Trainer(model, batches, optimizer, "cpu")
    trainer.train(3)
"""
OWN_OPTIMIZER = """import torch


class Careful(torch.optim.Optimizer):
    def first_step(self):
        pass


loader = DataLoader(data)
model = Net()
optimizer = Careful(model.parameters())
for x in loader:
    model(x).backward()
    optimizer.first_step()
"""

EXPECTED = {
    "flat": (FLAT, [3, 6, 6, 13], "model, optimizer, loader"),
    "through a function": (CALLEE, [2, 25, 25, 29], "net, optim, schedule, train_loader"),
    "functions of globals": (GLOBAL, [2, 5, 5, 18], "model, optimizer, train_loader"),
    "two optimizers": (GAN, [3, 8, 8, 15], "generator, critic, opt_c, opt_g, loader"),
    "no loader": (NO_LOADER, [2, 6, 6, 13], "model, optimizer"),
    "endless loop": (NO_LOADER.replace("        break", "        sys.exit()"), [2, 6, 6, 12], "model, optimizer"),
    "shuffled by hand": (SHUFFLED, [2, 7, 7, 12], "model, optimizer"),
    "only if it trains": (CONDITIONAL, [2, 3, 6, 14], "model, optimizer"),
    "a function above all": (GUARDED, [2, 12, 12, 14], "net, opt"),
    "an iterator": (CALLED_NEXT, [2, 5, 5, 16], "model, optimizer, loader"),
    "a trainer": (TRAINER, [2, 19, 19, 21], "model, optimizer, batches"),
    "an optimizer class": (OWN_OPTIMIZER, [2, 11, 11, 14], "model, optimizer, loader"),
    "a class": (CLASS, [2, 17, 17, 19], "model, optimizer, loader"),
    "a loader in a class": (WRAPPED.replace("SHUFFLE", "shuffle=True"), [2, 13, 13, 20], "model, optimizer"),
}


def added(source: str, tmp_path: Path) -> tuple[list[AddedLine], list[str]]:
    (tmp_path / "train.py").write_text(source)
    script = read_script(tmp_path / "train.py")
    usage = Usage(with_helpers(script))
    return lines_for(usage, find_roles(usage))


def refusal(tmp_path: Path, source: str) -> list[str]:
    (tmp_path / "train.py").write_text(source)
    with pytest.raises(UserError) as refused:
        require_paceline(tmp_path / "train.py")
    return str(refused.value).splitlines()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_lines_have_the_names_and_places_of_the_script(name: str, tmp_path: Path) -> None:
    source, after, names = EXPECTED[name]
    lines, _ = added(source, tmp_path)
    calls = ["import paceline", "session = paceline.join()", f"{names} = session.prepare({names})", "session.finish()"]
    assert [line.code.strip() for line in lines] == calls
    assert [line.after + (line.code == "import paceline") for line in lines if isinstance(line.after, int)] == after
    (tmp_path / "train.py").write_text(apply_lines(source, lines))
    compile((tmp_path / "train.py").read_text(), "train.py", "exec")
    require_paceline(tmp_path / "train.py")


def test_data_that_is_walked_in_order_is_split_before_it_is_measured(tmp_path: Path) -> None:
    lines, _ = added(IN_ORDER, tmp_path)
    joined = apply_lines(IN_ORDER, lines)
    assert len(lines) == 6
    assert joined.index("session = ") < joined.index("inputs = session.split(inputs)") < joined.index("n = len")
    assert joined.index("targets = inputs + 1") < joined.index("targets = session.split(targets)")


def test_a_column_of_batches_is_split_through_the_function_that_reads_it(tmp_path: Path) -> None:
    source = IN_ORDER.replace("model(inputs[i : i + 8]), targets[i : i + 8]", "*get(inputs, i)")
    source = source.replace("n = len(inputs)\n", "").replace("range(0, n, 8)", "range(0, inputs.size(0) - 1, 8)")
    lines, _ = added("def get(rows, k):\n    return rows[k : k + 8], rows[k + 1 : k + 9]\n\n\n" + source, tmp_path)
    assert [line.code for line in lines if "split" in line.code] == ["inputs = session.split(inputs)"]


def test_a_function_of_a_helper_module_counts(tmp_path: Path) -> None:
    head, _, rest = CALLEE.partition("def score")
    (tmp_path / "engine.py").write_text(head)
    lines, _ = added(f"from engine import fit\nimport torch\n\n\ndef score{rest}", tmp_path)
    assert lines[2].code == "    {0} = session.prepare({0})".format("net, optim, schedule, train_loader")


def test_a_trainer_that_makes_the_optimizer_gets_the_lines_in_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/trainer.py").write_text(
        textwrap.dedent(
            """
            import torch

            class Trainer:
                def __init__(self, model, rows):
                    self.model, self.rows = model, rows

                def run(self):
                    model = self.model
                    self.optimizer = model.configure_optimizers()
                    loader = torch.utils.data.DataLoader(self.rows)
                    batches = iter(loader)
                    while True:
                        model(next(batches)).backward()
                        self.optimizer.step()
                        if done():
                            break
            """
        )
    )
    source = "from engine.trainer import Trainer\n\nmodel = Net()\ntrainer = Trainer(model, rows)\ntrainer.run()\n"
    lines = refusal(tmp_path, source)
    assert "add these lines to engine/trainer.py, then" in lines[0]
    names = "model, self.optimizer, loader"
    assert lines[3] == f"  after 11 +         {names} = session.prepare({names})"
    assert lines[4] == "  after 17 +         session.finish()"


def test_a_trainer_that_makes_its_optimizer_at_its_start_is_told_to_prepare_there(tmp_path: Path) -> None:
    source = textwrap.dedent(
        """
        import torch

        class Trainer:
            def __init__(self, model, rows):
                loader = torch.utils.data.DataLoader(rows)
                self.model, self.batches = model, cycle(loader)
                self.opt = torch.optim.Adam(model.parameters())

            def train(self):
                while not done():
                    self.model(next(self.batches)).backward()
                    self.opt.step()
                    self.opt.zero_grad()

        model = Net()
        trainer = Trainer(model, rows)
        trainer.train()
        """
    )
    lines = refusal(tmp_path, source)
    assert "MODEL, self.opt, loader = session.prepare(MODEL, self.opt, loader)" in lines[3]
    assert "line 8 makes the optimizer: prepare it there, before anything iterates over the loader" in lines


def test_weights_that_are_clamped_and_optimizers_that_step_only_alone_are_said(tmp_path: Path) -> None:
    assert any("line 11 clamps weights by hand" in line for line in refusal(tmp_path, CALLED_NEXT))
    lines = refusal(tmp_path, FLAT.replace("torch.optim.SGD", "torch.optim.LBFGS"))
    assert any("LBFGS steps only alone" in line for line in lines)


@pytest.mark.parametrize(
    ("source", "note"),
    [
        (NO_LOADER, "every worker draws batches with random numbers of its own"),
        (WRAPPED.replace("SHUFFLE", "shuffle=True"), "every worker draws batches with random numbers of its own"),
        (WRAPPED.replace("SHUFFLE", "8"), "batches gives every worker the same batches"),
        (CONDITIONAL, "no training loader was found"),
        (FLAT.replace("optimizer = torch.optim.SGD", "opts[0] = torch.optim.SGD"), "the optimizer was not found"),
        (
            CALLEE.partition("    for epoch")[0] + "    return fit(net, train_loader, optim)\n",
            "call session.finish() where",
        ),
    ],
    ids=["random numbers", "wrapped", "wrapped in order", "unknown data", "no optimizer", "returns"],
)
def test_what_was_not_found_is_said(source: str, note: str, tmp_path: Path) -> None:
    _, notes = added(source, tmp_path)
    assert any(note in one for one in notes)


def test_weights_that_are_changed_by_hand_need_an_optimizer(tmp_path: Path) -> None:
    lines = refusal(tmp_path, BY_HAND)
    assert "line 7 changes the weights by hand" in lines[0] and "torch.optim.SGD(model.parameters()" in lines[1]
    both = FLAT.replace("        optimizer.step()", "        optimizer.step()\n        w -= 0.1 * w.grad")
    assert any("line 14 changes weights by hand" in line for line in refusal(tmp_path, both))


def test_a_script_without_a_training_loop_gets_the_lines_in_general(tmp_path: Path) -> None:
    lines = refusal(tmp_path, "import trainer_of_somebody\n\ntrainer_of_somebody.main()\n")
    assert lines[1].endswith("+ import paceline") and "MODEL, OPTIMIZER, LOADER = session.prepare(" in lines[3]
    assert "not found in train.py: the model and the optimizer and the loader" in lines
    assert any("'import paceline' is enough" in line for line in lines)


@pytest.mark.parametrize("imported", ["import paceline.api", "from paceline import join", "import_module('paceline')"])
def test_a_script_that_imports_paceline_itself_or_in_a_helper_is_not_refused(imported: str, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/__init__.py").write_text("")
    (tmp_path / "inner/loop.py").write_text("from . import deep\nfrom importlib import import_module\n")
    (tmp_path / "inner/deep.py").write_text(f"from importlib import import_module\n\n{imported}\n")
    (tmp_path / "train.py").write_text("import inner.loop\n")
    require_paceline(tmp_path / "train.py")
    (tmp_path / "train.py").write_text("import os, inner\n")
    with pytest.raises(UserError, match="does not use Paceline"):
        require_paceline(tmp_path / "train.py")


def test_the_command_line_prints_the_lines_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(GLOBAL)
    assert main(["run", "-n", "2", "train.py"]) == 2
    expected = """\
        paceline: train.py does not use Paceline: add these lines, then run it again
          line 2   + import paceline
          after 5  + session = paceline.join()
          after 5  + model, optimizer, train_loader = session.prepare(model, optimizer, train_loader)
          after 18 +     session.finish()
        see docs/own-code.md
    """
    assert capsys.readouterr().err == textwrap.dedent(expected)
    assert not Path("runs").exists()


def test_a_syntax_error_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n\nfor x in :\n    pass\n")
    assert main(["run", "-n", "2", "train.py"]) == 2
    assert capsys.readouterr().err == "paceline: train.py, line 3: invalid syntax: Python cannot read this script\n"


WITH_GROUP = """import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DDP(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += y.gather(0, x)
    dist.all_reduce(total)
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.barrier()
dist.destroy_process_group()
"""


def test_all_that_needs_a_process_group_is_named_with_what_to_do_instead(tmp_path: Path) -> None:
    assert refusal(tmp_path, WITH_GROUP)[1:] == [
        "  line 7   + import paceline",
        "  after 8  + session = paceline.join()",
        "  after 13 + model, optimizer, loader = session.prepare(model, optimizer, loader)",
        "  after 25 + session.finish()",
        "to average gradients as DDP does: paceline run --strategy sync train.py",
        "line 8: init_process_group(...): leave it out",
        "line 9: get_rank(): session.worker instead",
        "line 9: get_world_size(): session.num_workers instead",
        "line 10: DistributedDataParallel(...): use the model itself",
        "line 12: DistributedSampler(...): leave it out, and give the DataLoader shuffle=False in place of its sampler",
        "line 15: set_epoch(...): leave it out",
        "line 19: clip_grad_norm_(...): clips the gradient of each worker, before the mean; DDP clips the mean, so the "
        "weights differ",
        "line 22: all_reduce(...): leave it out; the value is of this worker's share, and session.report(name=value) "
        "shows those of all",
        "line 24: model.module: model itself",
        "line 25: barrier(...): leave it out",
        "line 26: destroy_process_group(...): leave it out",
        "see docs/own-code.md",
    ]
    assert not any(line.startswith("line ") for line in refusal(tmp_path, FLAT + "loader.set_epoch(1)\n"))
    clips = FLAT.replace(
        "        optimizer.step()", "        clip_grad_norm_(model.parameters(), 1)\n        optimizer.step()"
    )
    assert not any("clip" in line for line in refusal(tmp_path, clips)), "clipping is that of a plain script"


def test_ranks_that_a_function_asks_for_begin_the_session_below_the_imports(tmp_path: Path) -> None:
    asks = FLAT.replace(
        "\n\n", "\nimport os\n\n\ndef is_first():\n    return int(os.environ['LOCAL_RANK']) == 0\n\n\n", 1
    )
    lines = refusal(tmp_path, asks.replace("Linear(2, 2)", "Linear(2, 2)\nmodel = DistributedDataParallel(model)"))
    assert lines[1:3] == ["  line 4   + import paceline", "  after 3  + session = paceline.join()"]
    assert "line 7: os.environ['LOCAL_RANK']: session.worker instead" in lines
    assert not any("LOCAL_RANK" in line for line in refusal(tmp_path, asks)), "it has no process group"


@pytest.mark.parametrize("asked", ["rank == 0", "is_main_process()", "not args.rank"])
def test_a_file_that_one_worker_writes_is_not_named(asked: str, tmp_path: Path) -> None:
    saves = f"if {asked}:\n    torch.save(model, 'model.pt')\n"
    assert not any("torch.save" in line for line in refusal(tmp_path, FLAT + saves))
    called = f"def keep():\n    torch.save(model, 'model.pt')\n\n\nif {asked}:\n    keep()\n"
    assert not any("torch.save" in line for line in refusal(tmp_path, FLAT + called))
    assert any("torch.save" in line for line in refusal(tmp_path, FLAT + called + "keep()\n"))


EVALUATES = """import torch
from torch.utils.data import DataLoader
from saving import keep

model = torch.nn.Linear(2, 2)
teacher = torch.nn.Linear(2, 2).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data)


@torch.no_grad()
def accuracy(net, batches):
    return sum(net(x) for x, y in batches)


def one_epoch(net):
    for x, y in loader:
        with torch.no_grad():
            wanted = teacher(x)
        optimizer.zero_grad()
        loss(net(x), wanted).backward()
        optimizer.step()
    with torch.no_grad():
        print(net(test_x))


best = 0
for epoch in range(3):
    one_epoch(model)
    if (found := accuracy(model, test_loader)) > best:
        best = found
        torch.save(model.state_dict(), "best.pt")
accuracy(model, test_loader)
keep(model)
"""


def test_files_that_all_workers_would_write_and_evaluations_on_the_way_are_named(tmp_path: Path) -> None:
    (tmp_path / "saving.py").write_text("from torch import save\n\n\ndef keep(model):\n    save(model, 'last.pt')\n")
    lines = refusal(tmp_path, EVALUATES)
    how = "inside 'with session.eval_weights():', to evaluate the weights that would be saved"
    once = "torch.save(...): only if session.is_main, because every worker runs this line"
    assert lines[-5:] == [
        f"line 23: evaluate {how}",
        f"line 30: accuracy(...): {how}",
        f"line 32: {once}",
        f"saving.py line 5: {once}",
        "see docs/own-code.md",
    ]
    assert not any("eval_weights" in line or "is_main" in line for line in refusal(tmp_path, FLAT))
