"""What is done to a data set between its files and a model: how it is read, and what happens to every batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config import RunConfig
from paceline.data.datasets import DATASETS, Reading
from paceline.errors import UserError

if TYPE_CHECKING:
    pass

WAYS = ("crop", "mirror")
AUTOMATIC = {"cifar10": WAYS, "imagenet": WAYS}
"""Data sets whose published runs were trained so."""
PADDING = 4
"""Black pixels around an image before a random window of its own size is cut out of it."""


def reading_of(config: RunConfig) -> Reading:
    """How the config wants files to be read."""
    return Reading(config.max_length, config.image_size)


def ways_of(config: RunConfig) -> tuple[str, ...]:
    """What is done to training images, in order.

    >>> ways_of(RunConfig(dataset="cifar10")), ways_of(RunConfig()), ways_of(RunConfig(augment="mirror"))
    (('crop', 'mirror'), (), ('mirror',))
    """
    text = config.augment
    if text == "auto":
        return AUTOMATIC.get(config.dataset, ()) if config.task is None else ()
    ways = () if text == "none" else tuple(part.strip() for part in text.split(","))
    if any(way not in WAYS for way in ways) or len(set(ways)) < len(ways):
        raise UserError(f"--augment '{text}': give auto, none, crop, mirror or crop,mirror")
    return ways


def check_preparation(config: RunConfig) -> None:
    """Settings that the data set has no use for, said before anything is read."""
    ways = ways_of(config)
    if config.task is not None:
        if ways:
            raise UserError(
                f"--augment {config.augment} is for built-in data sets: a task of your own has its transform"
            )
        return
    shape = DATASETS[config.dataset].image_shape
    if ways and len(shape) == 1:
        raise UserError(f"--augment {config.augment} is for images, and dataset {config.dataset} holds sentences")
    if len(shape) == 1:
        from paceline.data.sst import MAX_LENGTH

        if config.max_length > MAX_LENGTH:
            raise UserError(f"--max-length {config.max_length}: the transformer reads at most {MAX_LENGTH} words")
