"""Messages fit the run they are about: advice that works, causes that are possible, nothing said twice or left out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.status import read_status
from paceline.analysis.stragglers import stragglers
from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.core.messages import Drain
from paceline.core.server import Divergence
from paceline.data.datasets import DATASETS
from paceline.runs.result import why_diverged
from paceline.runtimes.server.admission import WorkerHost, WorkerHosts
from paceline.settings.fault_table import Fault, faults_toml
from paceline.settings.stopping import why_missed
from paceline.settings.strategies import STRATEGIES
from tests.support.recorded_runs import RecordedRun, small_config

Said = pytest.CaptureFixture[str]
TRAIN = ["train", "--dataset", "fashion-mnist-sample", "--model", "cnn", "--threads", "1", "--strategy", "classic"]
SIMULATE = ["simulate", "--dataset", "fashion-mnist-sample", "--threads", "1", "--workers", "2"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PACELINE_SYSTEM_DATA", str(tmp_path / "system"))


def test_doctor_and_the_list_of_data_sets_offer_only_downloads_that_exist(capsys: Said) -> None:
    main(["doctor"])
    doctor = capsys.readouterr().out
    assert main(["data", "list"]) == 0
    listed = capsys.readouterr().out
    for name in ("mnist", "cifar10", "sst5"):
        assert f"'paceline data get {name}' fetches" in doctor and f"'paceline data get {name}' fetches" in listed
    assert "data set imagenet: not here; give --data-dir" in doctor
    assert "data get imagenet" not in doctor + listed and "imagenet" in DATASETS


@pytest.mark.real
def test_a_forecast_of_a_run_leaves_out_what_only_training_has(capsys: Said) -> None:
    evaluated = ["--eval-every", "0.1", "--target-accuracy", "99", "--best", "max:accuracy"]
    small = ["--strategy", "async", "--workers", "2", "--model", "lenet5", "--epochs", "0.3"]
    assert main([*TRAIN, *small, "--name", "run", *evaluated]) == 0
    for more in (["--timing-only"], []):
        name = f"forecast{len(more)}"
        assert main(["simulate", "--like", "runs/run", "--name", name, *more]) == 0
    capsys.readouterr()
    assert main(["simulate", "--like", "runs/run", "--timing-only", "--eval-every", "1"]) == 2
    assert "leave out --eval-every" in capsys.readouterr().err


@pytest.mark.parametrize("name", STRATEGIES)
def test_staleness_is_a_cause_of_a_divergence_only_if_pushes_can_be_stale(name: str, tmp_path: Path) -> None:
    form = {"backup": "backup:1", "bounded": "bounded:2"}.get(name, f"{name}:2" if "lo" in name else name)
    config = small_config(tmp_path, strategy=form, workers=1 if name == "classic" else 2)
    with_run = RecordedRun(config)
    try:
        assert "stale" not in why_diverged(config, with_run.server).lower()  # none has been stale yet
        with_run.server.staleness[1] += 1
        why = why_diverged(config, with_run.server)
    finally:
        with_run.host.close()
    assert ("stale" in why.lower()) == (name in ("async", "bounded", "async-local"))
    assert "--lr 0.025 (now 0.1)" in why


def why_of(folder: Path, pushes: int, is_update_finite: bool, **settings: Any) -> str:
    """What is said of an async run that diverged after so many pushes of worker 0."""
    run = RecordedRun(small_config(folder, strategy="async", workers=2, **settings))
    run.join_all()
    for _ in range(pushes):
        run.push(0)
    run.server.divergence = Divergence(1, pushes, math.inf, is_update_finite)
    run.close()
    return why_diverged(run.config, run.server)


def test_a_nan_before_the_first_step_is_not_blamed_on_the_lr(tmp_path: Path) -> None:
    why = why_of(tmp_path, pushes=0, is_update_finite=False)
    assert "at update 0" in why and "No step was made yet" in why and "the inputs" in why and "--lr" not in why


def test_a_loss_that_is_no_number_is_blamed_on_the_loss_function_only_if_it_is_the_users(tmp_path: Path) -> None:
    ours = why_of(tmp_path / "ours", pushes=3, is_update_finite=True)
    assert "check the loss function" not in ours and "try --lr 0.025 (now 0.1)" in ours
    users = why_of(tmp_path / "users", pushes=3, is_update_finite=True, task="task.py:build")
    assert "check the loss function" in users


def test_an_lr_far_above_the_default_is_not_lowered_step_by_step(tmp_path: Path) -> None:
    why = why_of(tmp_path, pushes=3, is_update_finite=False, lr=1e6)
    assert "try --lr 0.005 (the default, now 1e+06)" in why


def test_the_reason_of_a_failed_run_is_said_once(capsys: Said) -> None:
    assert main([*TRAIN, "--epochs", "0.1", "--lr", "1e30", "--name", "nan"]) == 3
    said = capsys.readouterr()
    assert (
        said.out.startswith("diverged: cnn on fashion-mnist-sample")
        and (said.out + said.err).count("training diverged at update") == 1
    )
    assert "tale" not in said.err.replace("scale", "")


def test_a_drained_worker_is_no_straggler(tmp_path: Path) -> None:
    """Its steps were slower than those of the others since: they have its core."""
    run = RecordedRun(small_config(tmp_path, strategy="async", workers=2, epochs=20.0))
    run.join_all()
    for worker in (0, 1) * 4:
        run.push(worker)
    run.host.handle(Drain(1))
    run.push(1)
    for _ in range(4):
        run.push(0)
    rows = [run.host.accounting.row(run.server, run.host.clock.source())]
    run.host.close()
    assert rows[0]["state"] == ["live", "drained"]
    slow = {"computing": [1.0, 9.0], "waiting": [0.0, 0.0], "steps": [9, 9], "pushes": [9, 9]}
    run.folder.events_file.write_text(_event({"kind": "workers", "now": 9.0, **rows[0], **slow}))
    assert stragglers(read_status(run.folder.path).workers) == []


def _event(row: dict[str, object]) -> str:
    from paceline.system.strict_json import to_json

    return to_json(row) + "\n"


def test_threads_are_advised_only_to_workers_that_have_more() -> None:
    hosts, here = WorkerHosts(), WorkerHost("m", cores=2, process=1, threads=1, clock=0.0)
    lines = [line for number in range(3) for line in hosts.come(number, here._replace(process=number), 0.0)]
    assert len(lines) == 1 and "with 3 threads" in lines[0]
    assert "--threads" not in lines[0] and "fewer workers" in lines[0]


LATE = Fault("crash", 6000.0, 1)


def test_a_simulated_fault_that_comes_too_late_is_mentioned(tmp_path: Path, capsys: Said) -> None:
    Path("faults.toml").write_text(faults_toml([Fault("pause", 0.1, 0, lasts=1.0), LATE]))
    assert main([*SIMULATE, "--timing-only", "--epochs", "0.05", "--faults", "faults.toml"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "never fired" in line]
    assert len(said) == 1 and said[0].startswith("a fault of faults.toml (crash of worker 1 at 6000 s) never fired")


def test_a_process_that_is_not_there_is_not_said_to_stand_still() -> None:
    from paceline.runtimes.local.fault_injection import FaultInjector

    told: list[str] = []
    tell: Callable[[Fault, str, bool], None] = lambda fault, text, returns: told.append(text)  # noqa: E731
    injector = FaultInjector((Fault("pause", 1.0, 1, lasts=2.0), LATE), tell, lambda worker: None, lambda: 100.0)
    assert injector.set_clock(2.0, runs=True) == ()
    injector.act()
    assert told == ["fault at 1 s: worker 1 is not there for the pause"]
    assert injector.set_clock(3.0, runs=False) == (LATE,)


def test_a_strategy_without_its_number_is_told_that_it_needs_one(capsys: Said) -> None:
    assert main(["train", "--strategy", "diloco"]) == 2
    assert "write diloco:H, with a number for H" in capsys.readouterr().err
    assert main(["train", "--strategy", "sync:3"]) == 2
    assert "write sync, without a number" in capsys.readouterr().err
    assert main(["train", "--strategy", "classic", "--path", "ring"]) == 2
    assert "needs a server" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "-n", "2", "--workers", "3", "x.py"], "-n 2 and --workers 3 are one setting: leave one out"),
        (["plan", "--link", "foo"], "--link 'foo'"),
        (["plan", "--server-time", "2 parsecs"], "'2 parsecs'"),
        (["train", "--eval-every", "1", "--target", "acc>90"], "as in --target 'accuracy>=VALUE'"),
        (["train", "--eval-every", "1", "--target", "accuracy=90"], "as in 'accuracy>=90'"),
        (["train", "--device", "gpu"], "unknown device 'gpu': did you mean 'cuda'?"),
        (["train", "--rule", "xyzzy"], "unknown rule 'xyzzy', known are: ahead,"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_measured_or_read(words: list[str], said: str, capsys: Said) -> None:
    assert main(words) == 2
    found = capsys.readouterr()
    assert said in found.err and "probing" not in found.err and "built-in sample" not in found.err


@pytest.mark.parametrize(
    ("target", "result", "said"),
    [
        ("loss<=0.2", {"metrics": {"loss": 0.31}}, "target loss <= 0.2 was not reached: at the end it was 0.31"),
        ("los<=0.2", {"metrics": {"loss": 0.1, "acc": 90.0}}, "no worker reported los: reported were acc, loss"),
        ("los<=0.2", {}, "no worker reported los: session.report(...) does that"),
        ("loss<=0.2", {"metrics": {"loss": 0.1}}, None),
        ("loss<=0.2", {"reason": "target loss <= 0.2 reached"}, None),
        ("loss<=0.2", {"status": "stopped"}, None),
        (None, {}, None),
    ],
)
def test_a_target_that_a_loop_missed_is_said(target: str | None, result: dict[str, Any], said: str | None) -> None:
    ended = {"status": "finished", "reason": None, **result}
    found = why_missed(RunConfig(task="script:loop.py", target=target), ended)
    assert found is None if said is None else said in (found or "")


@pytest.mark.long
def test_a_target_that_an_evaluation_missed_is_said(capsys: Said) -> None:
    evaluated = ["--eval-every", "0.05", "--target", "accuracy>99.9"]
    assert main([*TRAIN, "--epochs", "0.1", *evaluated]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "paceline: target accuracy 99.9 % was not reached: at the end it was" in said


def test_a_run_whose_settings_have_no_effect_replays_and_its_lost_result_is_written_again(
    tmp_path: Path, capsys: Said
) -> None:
    """Its config.toml holds what a new run is refused; the advice of a damaged result works."""
    (tmp_path / "run.toml").write_text('optimizer = "adam"\nmomentum = 0.5\nsteps = 3\nepochs = 2\n')
    assert main([TRAIN[0], "run.toml", *TRAIN[1:], "--name", "old", "--score", "test"]) == 0
    assert main(["replay", "runs/old"]) == 0
    file = tmp_path / "runs/old/result.json"
    before = json.loads(file.read_text())
    file.write_text("{")
    capsys.readouterr()
    assert main(["status", "runs/old"]) == 2
    assert "remove this file, then 'paceline resume runs/old' continues" in capsys.readouterr().err
    file.unlink()
    assert main(["resume", "runs/old"]) == 0
    assert json.loads(file.read_text())["weights_sha256"] == before["weights_sha256"]


def test_a_task_that_calls_sys_exit_does_not_pretend_success(tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "exits.py").write_text(
        "import sys, torch, paceline\n"
        "calls = []\n"
        "def loss(outputs, targets):\n"
        "    calls.append(1)\n"
        "    return sys.exit(0) if len(calls) > 9 else torch.nn.functional.cross_entropy(outputs, targets)\n"
        "def build():\n"
        "    data = torch.zeros(400, 2), torch.zeros(400, dtype=torch.int64)\n"
        "    return paceline.Task(torch.nn.Linear(2, 2), loss, train=data)\n"
    )
    assert main(["train", "--task", "exits.py:build", *TRAIN[5:], "--name", "it"]) == 1
    assert "paceline: sys.exit(0) (exits.py, line 5)" in capsys.readouterr().err
    assert json.loads((tmp_path / "runs/it/result.json").read_text())["status"] == "stopped"
