"""`paceline landscape` from the command line: a landscape known in closed form, and every mistake in one line."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.cli.main import main

TASK = """
import torch, paceline
def build(width=4):
    x = torch.randn(32, width, generator=torch.Generator().manual_seed(7)) * torch.linspace(1, 3, width)
    y = x @ torch.arange(1.0, width + 1)[:, None]
    return paceline.Task(torch.nn.Linear(width, 1, bias=False), torch.nn.functional.mse_loss, train=(x, y))
def wider():
    return build(5)
"""
SMALL = ["--strategy", "classic", "--steps", "16", "--batch-size", "8", "--threads", "1", "--lr", "0.02"]


def train(name: str, *arguments: str, task: str = "build") -> Path:
    assert main(["train", "--task", f"task.py:{task}", *SMALL, "--name", name, *arguments]) in (0, 3)
    return Path("runs") / name


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of a linear model with a snapshot after every second update."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__paceline_main__", None)  # each test has a task file of its own
    Path("task.py").write_text(TASK)
    return train("it", "--snapshots", "2")


def look(run: Path, *arguments: str) -> None:
    """Everything but the picture, which takes matplotlib seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        assert main(["landscape", str(run), *arguments, "-o", "out"]) == 2


def snapshots(run: Path) -> torch.Tensor:
    return torch.cat([load_file(path)["weight"] for path in sorted(run.glob("snapshots/*.safetensors"))])


def test_a_quadratic_has_the_landscape_it_must_have(run: Path) -> None:
    look(run, "--grid", "5")
    points = snapshots(run).double()
    mean = points.mean(0)
    directions = torch.linalg.svd(points - mean).Vh[:2]
    x = (torch.randn(32, 4, generator=torch.Generator().manual_seed(7)) * torch.linspace(1, 3, 4)).double()
    answer = torch.arange(1.0, 5.0).double()
    facts = json.loads(Path("out/landscape.json").read_text())
    (path,) = [one["path"] for one in facts["runs"]]
    place = torch.tensor([[point["x"], point["y"]] for point in path]).double()
    projected = (points - mean) @ directions.T
    signs = (projected * place).sum(0).sign()
    torch.testing.assert_close(place, projected * signs, rtol=1e-4, atol=1e-5)
    rows = list(csv.reader(Path("out/landscape.csv").read_text().splitlines()))
    assert rows[0] == ["x", "y", "loss"]
    grid = [tuple(map(float, row)) for row in rows[1:]]
    assert len(grid) == 25
    for one, other, loss in grid:
        weights = mean + torch.tensor([one, other]).double() * signs @ directions
        assert loss == pytest.approx(float((x @ (weights - answer)).square().mean()), rel=1e-3, abs=1e-6)
    for weights, point in zip(points, path, strict=True):
        assert point["loss"] == pytest.approx(float((x @ (weights - answer)).square().mean()), rel=1e-4, abs=1e-6)
    low, high = min(grid), max(grid)
    assert low[0] < place[:, 0].min() and high[0] > place[:, 0].max()
    assert 0.5 < sum(facts["explained"]) < 0.999999 and path[3]["distance_from_plane"] > 1e-4
    assert facts["grid"]["lowest"]["loss"] == pytest.approx(min(row[2] for row in grid), rel=1e-6)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line a mistake is answered with."""
    capsys.readouterr()
    assert main(["landscape", *arguments]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.strip().splitlines()[-1]


def test_bad_inputs_are_one_clear_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = train("none")
    assert "no snapshots" in said(capsys, str(none)) and "--snapshots" in said(capsys, str(none))
    few = train("few", "--snapshots", "0.001")
    assert "has 2 snapshots, a path needs at least 3" in said(capsys, str(few))
    other = train("other", "--snapshots", "2", task="wider")
    assert "one model" in said(capsys, str(run), str(other))
    assert "twice" in said(capsys, str(run), str(run))
    assert "not a run folder" in said(capsys, "nowhere")
    Path("file").write_text("in the way")
    assert "cannot be written" in said(capsys, str(run), "-o", "file/out")
    assert "no test data" in said(capsys, str(run), "--on", "test")
    for wrong in (["--grid", "1"], ["--margin", "-1"], ["--samples", "0"], ["--grid", "x"], ["--gird", "3"]):
        assert said(capsys, str(run), *wrong).startswith("paceline: ")
    if not torch.cuda.is_available():
        assert "no CUDA device" in said(capsys, str(run), "--device", "cuda")


def test_damaged_snapshots_are_one_clear_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = sorted(run.glob("snapshots/*.safetensors"))[1]
    whole = second.read_bytes()
    second.write_bytes(whole[:-3])
    assert f"{second} cannot be read (its checksum is wrong)" in said(capsys, str(run))
    second.unlink()
    assert "No such file" in said(capsys, str(run))
    Path("task.py").write_text(TASK.replace("width=4", "width=16"))
    sys.modules["__paceline_main__"] = None  # type: ignore[assignment]
    assert "the model was changed since the run" in said(capsys, str(run))


def poison(run: Path, names: list[str]) -> None:
    """Give some snapshots an infinity, as a diverged run has them."""
    import hashlib

    index = run / "snapshots/index.json"
    rows = {"snapshots": json.loads(index.read_text())["snapshots"]}
    for row in rows["snapshots"]:
        path = run / f"snapshots/{row['version']:012d}.safetensors"
        if path.name in names:
            save_file({"weight": load_file(path)["weight"] * torch.inf}, path)
            row["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    index.write_text(json.dumps(rows))


def test_what_is_not_finite_is_left_out_and_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [path.name for path in sorted(run.glob("snapshots/*.safetensors"))]
    poison(run, names[-2:])
    look(run, "--grid", "3")
    assert "left out because not finite: updates 14, 16" in capsys.readouterr().out
    facts = json.loads(Path("out/landscape.json").read_text())
    assert facts["runs"][0]["left_out"] == [14, 16] and len(facts["runs"][0]["path"]) == len(names) - 2
    poison(run, names[2:])
    assert "2 snapshots without a NaN or an infinity" in said(capsys, str(run))


def test_without_matplotlib_the_numbers_are_there(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'paceline[report]'" in said(capsys, str(run), "--grid", "3", "-o", "out")
    assert sorted(path.name for path in Path("out").iterdir()) == ["landscape.csv", "landscape.json"]


@pytest.mark.real
def test_several_runs_make_one_picture(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    runs = [str(train(f"it{number}", "--snapshots", "2", "--seed", str(number))) for number in (1, 2)]
    capsys.readouterr()
    assert main(["landscape", str(run), *runs, "--grid", "7", "-o", "out/deep", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [len(one["path"]) for one in facts["runs"]] == [9, 9, 9]
    picture = Path("out/deep/landscape.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


@pytest.mark.parametrize("average", ["on", "none"])
def test_paths_of_different_weights_are_told_apart(run: Path, average: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = train("other", "--snapshots", "2", "--average", average)
    capsys.readouterr()
    look(run, str(other), "--grid", "5")
    assert ("these are paths of different weights" in capsys.readouterr().out) == (average == "on")
    kinds = [one["weights"] for one in json.loads(Path("out/landscape.json").read_text())["runs"]]
    assert kinds == ["live", "averaged" if average == "on" else "live"]
