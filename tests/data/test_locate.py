"""Where data sets are looked for, in which order, and what is said when they are not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.data.datasets import DATASETS, load, locate
from paceline.data.download import status
from paceline.errors import DataError, UserError
from tests.support.data_files import Write


@pytest.mark.parametrize("layout", ["FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "."])
@pytest.mark.parametrize("packed", [True, False])
def test_layouts(tmp_path: Path, write_idx: Write, layout: str, packed: bool) -> None:
    write_idx(tmp_path / "data" / layout, packed=packed)
    found = locate("fashion-mnist", tmp_path / "data")
    assert (found.path, found.origin, found.kind, found.sample) == (
        tmp_path / "data" / layout,
        "data-dir",
        "idx",
        False,
    )


def test_order(tmp_path: Path, write_idx: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate("fashion-mnist", None).origin == "built-in sample"
    write_idx(tmp_path / "system" / "fashion-mnist")
    assert locate("fashion-mnist", None).origin == "system"
    write_idx(tmp_path / "xdg" / "paceline" / "fashion-mnist")
    assert locate("fashion-mnist", None).origin == "cache"
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "mine"))
    write_idx(tmp_path / "mine")
    assert locate("fashion-mnist", None).origin == "PACELINE_DATA"
    assert locate("fashion-mnist", write_idx(tmp_path / "asked")).origin == "data-dir"
    assert locate("fashion-mnist-sample", tmp_path / "asked").sample


def test_data_dir_without_the_set_is_an_error(tmp_path: Path, write_idx: Write) -> None:
    write_idx(tmp_path / "system" / "fashion-mnist")
    (tmp_path / "asked").mkdir()
    with pytest.raises(DataError, match="asked does not hold it"):
        locate("fashion-mnist", tmp_path / "asked")
    with pytest.raises(DataError, match="no such folder"):
        locate("fashion-mnist", tmp_path / "nowhere")


def test_incomplete_folder_says_what_it_lacks(tmp_path: Path, write_idx: Write) -> None:
    folder = write_idx(tmp_path / "asked")
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="without t10k-labels-idx1-ubyte"):
        locate("mnist", folder)


def test_environment_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="PACELINE_DATA"):
        locate("fashion-mnist", None)
    (tmp_path / "nowhere").mkdir()
    assert locate("fashion-mnist", None).sample


def test_not_found_lists_places_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="paceline data get mnist") as caught:
        locate("mnist", None)
    assert str(tmp_path / "system") in str(caught.value) and str(tmp_path / "xdg" / "paceline") in str(caught.value)


def test_unknown_name() -> None:
    with pytest.raises(UserError, match="did you mean 'fashion-mnist'"):
        locate("fashionmnist", None)


@pytest.mark.parametrize("layout", ["fashion-mnist", "FashionMNIST/raw"])
def test_one_set_is_not_taken_for_the_other(tmp_path: Path, write_idx: Write, layout: str) -> None:
    folder = write_idx(tmp_path / layout)
    assert locate("fashion-mnist", folder).path == folder
    with pytest.raises(DataError, match="does not hold it"):
        locate("mnist", folder)


def test_status(tmp_path: Path, write_idx: Write) -> None:
    write_idx(tmp_path / "system" / "MNIST" / "raw", num_train=600)
    rows = {row.name: row for row in status(None)}
    assert list(rows) == list(DATASETS)
    assert rows["mnist"].found and rows["mnist"].train_size == 600 and rows["mnist"].note == ""
    assert rows["fashion-mnist"].sample and rows["fashion-mnist"].train_size == 12_000
    assert not rows["cifar10"].found and "paceline data get cifar10" in rows["cifar10"].note
    assert all(row.licence and row.nbytes > 0 for row in rows.values())
    with pytest.raises(DataError, match="no such folder"):
        status(tmp_path / "nowhere")


def test_import_needs_no_torch() -> None:
    modules = "datasets, download, partition, sampler"
    code = f"import sys; from paceline.data import {modules}; assert not {{'torch', 'rich'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})


def test_sample_info_is_used_for_the_sample() -> None:
    assert load(locate("fashion-mnist", None)).info.name == "fashion-mnist-sample"
