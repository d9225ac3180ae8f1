"""Settings of the data: how the train set is divided and scored, how training images are augmented."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config import RunConfig
from paceline.data.catalog import DATASETS
from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.data.partition import Split

WAYS = ("crop", "mirror")
PADDING = 4  # black pixels around an image before a random window of its own size is cut out of it


def split_of(config: RunConfig) -> Split:
    """How the train set is divided over the workers."""
    from paceline.data.partition import parse_split  # it imports numpy, which a help text does without

    return parse_split(config.split)


def fold_of(config: RunConfig) -> tuple[int, int] | None:
    """Which fold of how many is held out, if any."""
    if config.fold is None:
        return None
    from paceline.data.partition import parse_fold

    return parse_fold(config.fold)


def train_score_of(config: RunConfig) -> int | None:
    """How many samples of the train data to score at the end, 0 for none; None: all."""
    text = config.train_score
    if text in ("all", "none"):
        return None if text == "all" else 0
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--train-score '{text}': give a number of samples, all or none")
    return int(text)


def check_train_score(config: RunConfig) -> None:
    """Refuse a number of train samples to score if the end of the run scores none."""
    train_score_of(config)
    if config.score != "all":
        asked = f"--train-score {config.train_score}"
        raise UserError(f"{asked}: --score {config.score} leaves the train data out; leave out one of the two")


def ways_of(config: RunConfig) -> tuple[str, ...]:
    """What is done to training images, in order.

    >>> ways_of(RunConfig(dataset="cifar10")), ways_of(RunConfig()), ways_of(RunConfig(augment="mirror"))
    (('crop', 'mirror'), (), ('mirror',))
    """
    text = config.augment
    if text == "auto":
        return DATASETS[config.dataset].augment if config.task is None else ()
    ways = () if text == "none" else tuple(part.strip() for part in text.split(","))
    if any(way not in WAYS for way in ways) or len(set(ways)) < len(ways):
        raise UserError(f"--augment '{text}': give auto, none, crop, mirror or crop,mirror")
    return ways


def check_augmentation(config: RunConfig) -> None:
    """Refuse settings that the data set has no use for, before anything is read."""
    ways = ways_of(config)
    if config.task is not None:
        if ways:
            raise UserError(f"--augment {config.augment} is for built-in data sets: your own task has its transform")
        return
    shape = DATASETS[config.dataset].image_shape
    if ways and len(shape) == 1:
        raise UserError(f"--augment {config.augment} is for images, and dataset {config.dataset} holds sentences")
    if len(shape) == 1:
        from paceline.data.sst import MAX_LENGTH

        if config.max_length > MAX_LENGTH:
            raise UserError(f"--max-length {config.max_length}: the transformer reads at most {MAX_LENGTH} words")
