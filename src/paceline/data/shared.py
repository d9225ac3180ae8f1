"""Share one copy of a data set between processes: four arrays, each in its own segment, without torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.datasets import Dataset, DatasetInfo, DecodingOptions, Location, load
from paceline.interfaces import Report
from paceline.system.shared_segment import Segment

_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


class SharedDataset:
    """A data set decoded directly into shared memory, with the descriptors to attach it in another process."""

    def __init__(self, location: Location, report: Report = lambda row: None) -> None:
        self._segments: list[tuple[Segment, np.ndarray[Any, Any]]] = []
        self.dataset = load(location, self._empty, report)
        by_address = {array.__array_interface__["data"][0]: segment for segment, array in self._segments}
        self.header: list[dict[str, Any]] = []
        self.fds: list[int] = []
        for name in _ARRAYS:
            array = getattr(self.dataset, name)
            segment = by_address[array.__array_interface__["data"][0]]
            self.header.append({"shape": array.shape, "dtype": str(array.dtype), "nbytes": segment.nbytes})
            self.fds.append(segment.fd)

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        segment = Segment.create(int(np.prod(shape)) * np.dtype(dtype).itemsize, "data set")
        array = segment.array(shape, dtype, 0)
        self._segments.append((segment, array))
        return array

    def spec(self) -> dict[str, Any]:
        """Return the arguments of `attach`, other than the descriptors, as JSON values."""
        location, info = dataclasses.asdict(self.dataset.location), dataclasses.asdict(self.dataset.info)
        return {"location": {**location, "path": str(location["path"])}, "info": info, "arrays": self.header}


def attach(spec: dict[str, Any], fds: list[int]) -> Dataset:
    """Return the data set that another process decoded, from its `spec` and its descriptors."""
    arrays = {}
    for name, fd, header in zip(_ARRAYS, fds, spec["arrays"], strict=True):
        segment = Segment.attach(fd, header["nbytes"])
        segment.close_descriptor()
        arrays[name] = segment.array(tuple(header["shape"]), header["dtype"], 0)
    found = spec["location"]
    location = Location(**{**found, "path": Path(found["path"]), "reading": DecodingOptions(**found["reading"])})
    facts: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in spec["info"].items()}
    return Dataset(info=DatasetInfo(**facts), location=location, **arrays)
