"""Weights from a file: what fits a model, what is refused and how, and what a run then begins from."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.assembly.core import make_model
from paceline.assembly.task import make_task
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.settings.resolve import MODELS, TEXT_MODELS, resolve
from paceline.system.sealed_weights import read_weights, seal_weights
from paceline.tasks.given_weights import read_given
from paceline.tasks.supervised import SupervisedTask


class Tied(nn.Module):
    """One embedding, used twice, a frozen layer and a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False)
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.fixed(self.norm(self.embed(words))))


def build() -> SupervisedTask:
    words = torch.arange(28) % 7
    return SupervisedTask(Tied(), F.cross_entropy, train=(words, words))


def config_for(path: Path, **settings: object) -> RunConfig:
    return resolve(RunConfig(task=f"{__name__}:build", strategy="classic", weights=str(path), **settings))  # type: ignore[arg-type]


def saved(path: Path, model: nn.Module, **changes: Tensor | None) -> Path:
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()} | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return path


@pytest.fixture
def other() -> Tied:
    torch.manual_seed(99)
    model = Tied()
    model.norm.running_mean.fill_(0.5)  # type: ignore[union-attr]
    model.norm.num_batches_tracked.fill_(12)  # type: ignore[union-attr]
    return model


def test_a_task_begins_with_every_tensor_of_the_file(tmp_path: Path, other: Tied) -> None:
    config = config_for(saved(tmp_path / "w.safetensors", other))
    task = make_task(config, None, read_given(config))
    kept = task.state_dict(task.initial(), None)
    assert kept.keys() == other.state_dict().keys()
    for name, tensor in other.state_dict().items():
        assert torch.equal(kept[name], tensor), name
    assert task.initial_weights is not None and task.initial_weights.loaded == len(kept)


def test_what_was_saved_after_the_load_has_the_counts_of_the_file(tmp_path: Path, other: Tied) -> None:
    """Integer buffers are saved as they were at the start: with given weights that is the file's value."""
    config = config_for(saved(tmp_path / "w.safetensors", other))
    task = make_task(config, None, read_given(config))
    task.model.norm.num_batches_tracked.add_(5)  # type: ignore[union-attr, operator]
    assert task.state_dict(task.initial(), None)["norm.num_batches_tracked"] == 12


def test_a_file_with_one_name_of_a_tied_weight_fits(tmp_path: Path, other: Tied) -> None:
    config = config_for(saved(tmp_path / "w.safetensors", other, **{"embed.weight": None}))
    task = make_task(config, None, read_given(config))
    assert torch.equal(task.model.embed.weight, other.head.weight)  # type: ignore[union-attr, arg-type]


def test_a_file_whose_tied_weights_differ_is_refused(tmp_path: Path, other: Tied) -> None:
    config = config_for(saved(tmp_path / "w.safetensors", other, **{"head.weight": torch.ones(7, 4)}))
    with pytest.raises(UserError, match=r"embed.weight and head.weight are one parameter of the model, and differ"):
        make_task(config, None, read_given(config))


MISFITS = {"fixed.bias": None, "norm.weight": torch.ones(5), "norm.num_batches_tracked": torch.tensor(1.5)}
MISFITS |= {f"extra.{number}": torch.ones(1) for number in range(5)}


def test_a_misfit_is_one_line_that_counts_and_names(tmp_path: Path, other: Tied) -> None:
    config = config_for(saved(tmp_path / "w.safetensors", other, **MISFITS))
    with pytest.raises(UserError) as refused:
        make_task(config, None, read_given(config))
    line = str(refused.value)
    assert "1 missing in the file: fixed.bias;" in line
    assert "5 unknown to the model: extra.0, extra.1, extra.2 and 2 more;" in line
    assert "norm.weight ([5] in the file, [4] in the model)" in line
    assert "norm.num_batches_tracked (float32 in the file, int64 in the model)" in line
    assert line.endswith("or load what fits with --weights-partial") and "\n" not in line


def test_partial_loads_what_fits_and_names_the_rest(tmp_path: Path, other: Tied) -> None:
    config = config_for(saved(tmp_path / "w.safetensors", other, **MISFITS), weights_partial=True)
    drawn = make_task(dataclasses.replace(config, weights=None), None)
    task = make_task(config, None, read_given(config))
    assert torch.equal(task.model.fixed.weight, other.fixed.weight)  # type: ignore[union-attr, arg-type]
    assert torch.equal(task.model.fixed.bias, drawn.model.fixed.bias)  # type: ignore[union-attr, arg-type]
    found = task.initial_weights
    assert found is not None and found.missing == ["fixed.bias"] and len(found.unexpected) == 5
    assert sorted(found.row()["unequal"]) == ["norm.num_batches_tracked", "norm.weight"]
    assert "and 2 more" in found.line()


def test_partial_with_nothing_that_fits_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "w.safetensors")
    config = config_for(tmp_path / "w.safetensors", weights_partial=True)
    with pytest.raises(UserError, match="no tensor fits the model by name and shape"):
        make_task(config, None, read_given(config))


def test_other_floating_types_are_converted_and_said(tmp_path: Path, other: Tied) -> None:
    half = {"fixed.weight": other.fixed.weight.detach().to(torch.bfloat16)}
    config = config_for(saved(tmp_path / "w.safetensors", other, **half))
    task = make_task(config, None, read_given(config))
    assert torch.equal(task.model.fixed.weight, half["fixed.weight"].float())  # type: ignore[union-attr, arg-type]
    assert task.initial_weights is not None
    assert "1 converted to the type of the model: fixed.weight" in task.initial_weights.line()


def test_a_trained_weight_that_is_not_finite_is_refused(tmp_path: Path, other: Tied) -> None:
    bad = torch.ones(4)
    bad[2] = torch.nan
    config = config_for(saved(tmp_path / "w.safetensors", other, **{"norm.weight": bad}))
    with pytest.raises(UserError, match=r"norm.weight has a NaN or infinity"):
        make_task(config, None, read_given(config))


def test_every_kind_of_bad_file_is_one_line(tmp_path: Path, other: Tied) -> None:
    good = saved(tmp_path / "good.safetensors", other).read_bytes()
    torch.save(other.state_dict(), tmp_path / "new.pt")
    torch.save(other.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "cut.safetensors").write_bytes(good[:-8])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "text.safetensors").write_text("these are no weights, and longer than a header's length")
    sealed = bytearray(seal_weights(good))
    sealed[-3] ^= 4
    (tmp_path / "flipped.safetensors").write_bytes(sealed)
    expected = {
        "new.pt": "a pickle, which can run code",
        "old.pt": "a pickle, which can run code",
        "cut.safetensors": "its tensors do not fill it",
        "empty.safetensors": "it is not a safetensors file",
        "text.safetensors": "it is not a safetensors file",
        "flipped.safetensors": "its checksum is wrong",
        "none.safetensors": "do not exist",
        ".": "are a folder",
    }
    for name, what in expected.items():
        with pytest.raises(UserError, match=what) as refused:
            config_for(tmp_path / name)
        assert "\n" not in str(refused.value)


def test_a_header_that_lies_about_a_tensor_is_one_line(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "w.safetensors")
    content = (tmp_path / "w.safetensors").read_bytes().replace(b'"shape":[4]', b'"shape":[5]')
    (tmp_path / "w.safetensors").write_bytes(content)
    config = config_for(tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="cannot be used"):
        read_given(config)


def test_flipped_bits_of_a_header_never_end_in_a_traceback(tmp_path: Path) -> None:
    save_file({"a.weight": torch.randn(3, 4), "b": torch.ones(2, dtype=torch.int64)}, tmp_path / "good")
    good, rng, refused = (tmp_path / "good").read_bytes(), random.Random(3), 0
    for number in range(200):
        content = bytearray(good)
        content[rng.randrange(len(content) - 64)] ^= 1 << rng.randrange(8)
        (path := tmp_path / str(number)).write_bytes(content)
        try:
            read_given(config_for(path))
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 100  # others changed a letter of a name, or spaces


def test_a_file_with_a_header_as_long_as_a_pickle_begins_is_read(tmp_path: Path) -> None:
    """The length of the header comes first in the file: 640 is 80 02, as pickles begin."""
    nbytes = 0
    for letters in range(400, 640):
        save_file({"a" * letters: torch.ones(2)}, tmp_path / "w.safetensors")
        content = (tmp_path / "w.safetensors").read_bytes()
        if (nbytes := int.from_bytes(content[:8], "little")) == 640:
            break
    assert nbytes == 640 and content.startswith(b"\x80\x02")
    assert read_weights(tmp_path / "w.safetensors") == content


def test_the_hash_is_recorded_and_another_file_is_refused(tmp_path: Path, other: Tied) -> None:
    path = saved(tmp_path / "w.safetensors", other)
    config = config_for(path)
    assert config.weights_sha256 is not None and len(config.weights_sha256) == 64
    assert config_for(path, weights_sha256=config.weights_sha256.upper()) == config
    saved(path, Tied())
    with pytest.raises(UserError, match=r"have the SHA-256 .*, not .*: the file was changed"):
        read_given(config)
    with pytest.raises(UserError, match="have the SHA-256"):
        config_for(path, weights_sha256=config.weights_sha256)


@pytest.mark.parametrize("setting", [{"weights_partial": True}, {"weights_sha256": "0" * 64}])
def test_settings_about_the_file_need_the_file(setting: dict[str, object]) -> None:
    with pytest.raises(UserError, match="is about the file of --weights: add --weights FILE"):
        resolve(RunConfig(**setting))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_the_shapes_of_a_built_in_model_are_known_without_its_memory(name: str) -> None:
    """So misfits are found before a process is started."""
    shape = (12,) if name in TEXT_MODELS else (3, 32, 32) if name != "inception-bn" else (3, 224, 224)
    with torch.device("meta"):
        model = make_model(name, shape, 10)
    assert all(tensor.device.type == "meta" for tensor in model.state_dict().values())


def test_a_path_is_a_setting_too(tmp_path: Path) -> None:
    assert RunConfig(weights=tmp_path / "w.safetensors").weights == str(tmp_path / "w.safetensors")  # type: ignore[arg-type]
