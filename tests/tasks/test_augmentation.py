"""Crops and mirrors: one gather a batch equals image by image, by address alone, and evaluation sees none of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.assembly.run import work_of
from paceline.assembly.task import make_task
from paceline.config import RunConfig
from paceline.data.datasets import Dataset
from paceline.errors import UserError
from paceline.settings.preprocessing import PADDING, ways_of
from paceline.simulation.lab.run import check_rows
from paceline.tasks.augmentation import Augment, _hashes, below
from paceline.tasks.supervised import Normalise

MakeDataset = Callable[..., Dataset]


def pictures(count: int = 6, height: int = 9, width: int = 7) -> Tensor:
    size = count * 3 * height * width
    return (torch.arange(size) * 7919 % 251 + 1).to(torch.uint8).view(count, 3, height, width)


def all_windows(image: Tensor, height: int, width: int) -> dict[tuple[int, int, bool], Tensor]:
    """Every window of one image, plain and mirrored, by hand."""
    found = {}
    for top in range(image.shape[1] - height + 1):
        for left in range(image.shape[2] - width + 1):
            window = image[:, top : top + height, left : left + width]
            found[top, left, False], found[top, left, True] = window, window.flip(2)
    return found


def test_every_result_is_a_window_of_its_own_image_and_all_windows_occur() -> None:
    images, augment = pictures(2, 5, 4), Augment((5, 4), 1, True)
    seen: set[tuple[int, int, int, bool]] = set()
    windows = [all_windows(F.pad(image, (1,) * 4), 5, 4) for image in images]
    for key in range(400):
        for number, result in enumerate(augment(images, key)):
            (place,) = [at for at, window in windows[number].items() if torch.equal(window, result)]
            seen.add((number, *place))
    assert len(seen) == 2 * 3 * 3 * 2


def test_the_numbers_are_spread_evenly() -> None:
    high, wide, mirrored = _hashes(90_000, 12345, torch.device("cpu"))
    for hashes, bound in ((high, 9), (wide, 9), (mirrored, 2)):
        shares = torch.bincount(below(hashes, bound), minlength=bound) / len(hashes)
        assert len(shares) == bound and (shares - 1 / bound).abs().max() < 0.006
    together = torch.bincount(below(high, 9) * 9 + below(wide, 9), minlength=81) / len(high)
    assert (together - 1 / 81).abs().max() < 0.003


def test_it_is_a_function_of_the_key_and_leaves_the_generator_alone() -> None:
    images, augment = pictures(), Augment((9, 7), 4, True)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = augment(images, 5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(augment(images, 5), first) and not torch.equal(augment(images, 6), first)
    assert torch.equal(augment(images[:2], 5), first[:2]), "a shorter batch is the beginning of a longer one"
    assert first.dtype == torch.uint8 and first.shape == images.shape


def test_each_way_alone() -> None:
    images = pictures()
    mirrored = Augment(None, 0, True)(images, 3)
    flags = [not torch.equal(after, before) for before, after in zip(images, mirrored, strict=True)]
    expected = [image.flip(2) if flag else image for image, flag in zip(images, flags, strict=True)]
    assert any(flags) and not all(flags) and torch.equal(mirrored, torch.stack(expected))
    smaller = Augment((6, 6), 0, False)(images, 3)
    assert smaller.shape == (6, 3, 6, 6) and (smaller > 0).all(), "nothing is padded where the image is larger"


def batch_of(config: RunConfig, dataset: Dataset) -> tuple[Tensor, np.ndarray]:
    task = make_task(config, dataset)
    batches = work_of(task, config).batches(0, config)
    return task.loader(batches, config.seed, 0).batch(3).inputs, batches.indices(3)


@pytest.mark.parametrize("name", ["fashion-mnist", "mnist"])
def test_batches_of_other_sets_are_what_they_were(make_dataset: MakeDataset, name: str) -> None:
    dataset = make_dataset(40, name=name)
    found, indices = batch_of(RunConfig(dataset=name, batch_size=4, seed=2), dataset)
    plain = Normalise(dataset.info.mean, dataset.info.std)(torch.from_numpy(dataset.train_images[indices]))
    assert torch.equal(found, plain)


def test_cifar10_is_augmented_in_training_and_never_in_evaluation(make_dataset: MakeDataset) -> None:
    dataset = make_dataset(40, name="cifar10")
    config = RunConfig(dataset="cifar10", batch_size=4, seed=2)
    found, indices = batch_of(config, dataset)
    normalise = Normalise(dataset.info.mean, dataset.info.std)
    raw = torch.from_numpy(dataset.train_images[indices])
    assert not torch.equal(found, normalise(raw))
    windows = [all_windows(F.pad(image, (PADDING,) * 4), 32, 32) for image in raw]
    for number, image in enumerate(found):
        assert any(torch.equal(normalise(window[None])[0], image) for window in windows[number].values())
    plain, _ = batch_of(replace(config, augment="none"), dataset)
    assert torch.equal(plain, normalise(raw))
    scores = [
        task.evaluate(task.initial(), None, task.train).loss
        for task in (make_task(config, dataset), make_task(replace(config, augment="none"), dataset))
    ]
    assert scores[0] == scores[1]


def test_larger_images_are_cut_at_random_in_training_and_in_the_middle_in_evaluation(make_dataset: MakeDataset) -> None:
    dataset = make_dataset(40, name="cifar10")
    dataset = replace(dataset, info=replace(dataset.info, image_shape=(3, 28, 28)))
    task = make_task(RunConfig(dataset="cifar10"), dataset)
    images = torch.from_numpy(dataset.train_images[:4])
    normalise = Normalise(dataset.info.mean, dataset.info.std)
    assert task.transform is not None and task.augment is not None
    assert torch.equal(task.transform(images), normalise(images[:, :, 2:30, 2:30]))
    cut = task.augment(images, 9)
    windows = [all_windows(image, 28, 28) for image in images]
    assert all(
        any(torch.equal(w, c) for w in local_state.values()) for local_state, c in zip(windows, cut, strict=True)
    )
    assert torch.equal(task.transform(cut), normalise(cut))


def test_the_lab_takes_images_as_they_are() -> None:
    check_rows([RunConfig(dataset="mnist"), RunConfig(dataset="cifar10", augment="none")])
    with pytest.raises(UserError, match="the lab augments the images of resnet20 only"):
        check_rows([RunConfig(dataset="cifar10")])
    with pytest.raises(UserError, match="the lab does not decode images"):
        check_rows([RunConfig(dataset="imagenet", augment="none")])


def test_ways_that_are_none() -> None:
    for text in ("flip", "crop,crop", "", "crop,none"):
        with pytest.raises(UserError, match=f"--augment '{text}': give auto, none, crop, mirror or crop,mirror"):
            ways_of(RunConfig(augment=text))
    assert ways_of(RunConfig(augment="none", dataset="cifar10")) == ()
    assert ways_of(RunConfig(augment="mirror, crop")) == ("mirror", "crop")
