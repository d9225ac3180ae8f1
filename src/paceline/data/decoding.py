"""Decode image files into one uint8 array, with one process per core; needs pillow (extra `images`)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.cifar import ARRAY_NAMES
from paceline.data.idx import Arrays, Empty
from paceline.errors import DataError, RunFailed, UserError
from paceline.system.cpu import cores
from paceline.system.process import helper_command, helper_environment
from paceline.system.strict_json import to_json

CHUNK = 32  # images per request to a decoder process
PROCESSES_THRESHOLD = 4 * CHUNK
MAX_NAMED = 3
_MAX_PIXELS = 1 << 28

Images = NDArray[np.uint8]


@dataclass
class Skipped:
    """The images that did not decode: their number, and the names of the first few."""

    count: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, path: str, reason: str) -> None:
        self.count += 1
        if len(self.named) < MAX_NAMED:
            self.named.append(f"{path} ({reason})")

    def line(self, total: int) -> str:
        """Return one line about all of them; empty if none was skipped."""
        if not self.count:
            return ""
        more = f" and {self.count - len(self.named):,} more" if self.count > len(self.named) else ""
        return f"{self.count:,} of {total:,} images do not decode and are skipped: {', '.join(self.named)}{more}"


def require_pillow() -> None:
    """Raise UserError if pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UserError("images in files need pillow, which is not installed: pip install 'paceline[images]'") from None


def require_memory_for(count: int, side: int) -> None:
    """Raise DataError if `count` decoded images of `side` x `side` do not fit in memory."""
    from paceline.system.memory import available_memory

    needed, free = count * 3 * side * side, available_memory()
    if needed > free:
        fitting = int((free / (3 * count)) ** 0.5) * 7 // 8
        raise DataError(
            f"{count:,} images of {side}x{side} need {needed / 2**30:,.1f} GiB of memory once decoded, but only "
            f"{free / 2**30:,.1f} GiB are free: use --image-size {max(fitting, 1)} or smaller, or fewer images"
        )


def decode(
    images: list[tuple[str, int]], side: int, empty: Empty, skipped: Skipped, progress: Callable[[int], None]
) -> tuple[Images, NDArray[np.int64]]:
    """Return pixels [N, 3, side, side] and labels [N] of the images that decode; call `progress(done)` per chunk."""
    require_pillow()
    pixels = empty((len(images), 3, side, side), np.dtype(np.uint8))
    labels = empty((len(images),), np.dtype(np.int64))
    filled = start = 0
    for faults in _fill([path for path, _ in images], pixels):
        places = range(start, min(start + CHUNK, len(images)))
        for place, reason in faults.items():
            skipped.add(images[start + place][0], reason)
        kept = [images[place][1] for place in places if place - start not in faults]
        if filled < start:  # close the gap that skipped images left
            pixels[filled : filled + len(kept)] = pixels[start : start + len(kept)]
        labels[filled : filled + len(kept)] = kept
        filled, start = filled + len(kept), places.stop
        progress(start)
    if filled == 0:
        raise DataError(f"none of {len(images):,} images decodes; {skipped.line(len(images))}")
    return pixels[:filled], labels[:filled]


def _fill(paths: list[str], pixels: Images) -> Iterator[dict[int, str]]:
    """Fill `pixels` chunk by chunk, with processes if there are many; yield each chunk's faults by place."""
    starts = range(0, len(paths), CHUNK)
    processes = min(cores(), len(starts))
    if processes < 2 or len(paths) < PROCESSES_THRESHOLD:
        for start in starts:
            found, faults = decode_chunk(paths[start : start + CHUNK], pixels.shape[2])
            pixels[start : start + len(found)] = found
            yield faults
        return
    idle: SimpleQueue[_Decoder] = SimpleQueue()
    decoders = [_Decoder() for _ in range(processes)]
    for decoder in decoders:
        idle.put(decoder)

    def fill(start: int) -> dict[int, str]:
        decoder = idle.get()
        try:
            return decoder.fill(paths[start : start + CHUNK], pixels[start : start + CHUNK])
        finally:
            idle.put(decoder)

    pool = ThreadPoolExecutor(processes, "decoding")
    try:
        yield from pool.map(fill, starts)
    finally:
        for decoder in decoders:
            decoder.kill()
        pool.shutdown(cancel_futures=True)


class _Decoder:
    """A child process that decodes one chunk per request. It imports no user code and exits at the end of its input."""

    def __init__(self) -> None:
        command, pipe = helper_command("paceline.data.decoding"), subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=helper_environment())

    def fill(self, paths: list[str], pixels: Images) -> dict[int, str]:
        """Write the images that decode into `pixels`, without gaps; return why the others do not, by place."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(to_json([paths, pixels.shape[2]]).encode() + b"\n")
            self.process.stdin.flush()
            faults = {int(place): reason for place, reason in json.loads(self.process.stdout.readline()).items()}
            target, filled = pixels[: len(paths) - len(faults)].reshape(-1).data, 0
            while filled < len(target):
                received = self.process.stdout.readinto(target[filled:])  # type: ignore[attr-defined]
                if not received:
                    raise EOFError
                filled += received
            return faults
        except (OSError, ValueError, EOFError):
            raise RunFailed("a process that decoded images died, perhaps out of memory: start the run again") from None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()


def main() -> None:
    """Decode one chunk per line of standard input, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        pixels, faults = decode_chunk(*json.loads(line))
        sys.stdout.buffer.write(to_json(faults).encode() + b"\n")
        sys.stdout.buffer.write(pixels.data)
        sys.stdout.buffer.flush()


def decode_chunk(paths: list[str], side: int) -> tuple[Images, dict[int, str]]:
    """Return the pixels [n, 3, side, side] of the images that decode, and why the others do not, by place."""
    found, faults = [], {}
    for place, path in enumerate(paths):
        try:
            found.append(_square(path, side))
        except Exception as error:  # a damaged file can raise anything
            faults[place] = " ".join(f"{type(error).__name__}: {error}".split())[:120]
    return (np.stack(found) if found else np.empty((0, 3, side, side), np.uint8)), faults


def _square(path: str, side: int) -> Images:
    """Return the centre square of an image, scaled to [3, side, side]."""
    from PIL import Image

    with Image.open(path) as image:
        if image.width * image.height > _MAX_PIXELS:
            raise ValueError(f"{image.width}x{image.height} pixels")
        image.draft("RGB", (side, side))  # decode a JPEG at 1/2, 1/4 or 1/8 of its size, which is faster
        colours: Any = image.convert("RGB")
    width, height = colours.size
    edge = min(width, height)
    left, top = (width - edge) / 2, (height - edge) / 2
    box = (left, top, left + edge, top + edge)
    scaled = colours.resize((side, side), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
    return np.ascontiguousarray(np.asarray(scaled, np.uint8).transpose(2, 0, 1))


def load_cached(cache: Path, source: Path, empty: Empty) -> Arrays | None:
    """Return the arrays cached for the current state of `source`, copied into arrays from `empty`, or None."""
    folder = _cache_entry(cache, source)
    if not folder.is_dir():
        return None
    try:
        cached = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAY_NAMES]
    except (OSError, ValueError, EOFError):
        return None
    num_train, num_test = len(cached[1]), len(cached[3])
    shapes = [(num_train, 3, 32, 32), (num_train,), (num_test, 3, 32, 32), (num_test,)]
    dtypes = [np.dtype(np.uint8), np.dtype(np.int64)] * 2
    if [array.shape for array in cached] != shapes or [array.dtype for array in cached] != dtypes:
        return None
    arrays = []
    for array in cached:
        target = empty(array.shape, array.dtype)
        target[...] = array
        arrays.append(target)
    return arrays[0], arrays[1], arrays[2], arrays[3]


def save_cached(cache: Path, source: Path, arrays: Arrays) -> None:
    """Cache `arrays` for `source` and delete entries of its earlier states; do nothing if the disk refuses."""
    folder = _cache_entry(cache, source)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        for name, array in zip(ARRAY_NAMES, arrays, strict=True):
            with (unfinished / f"{name}.npy").open("wb") as file:
                np.save(file, np.asarray(array), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        for old in folder.parent.glob(f"{folder.name.partition('-')[0]}-*"):
            shutil.rmtree(old, ignore_errors=True)
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)


def _cache_entry(cache: Path, source: Path) -> Path:
    """Return the cache folder of `source`: named after its path, size and modification time."""
    state = source.stat()
    key = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:16]
    return cache / "decoded" / f"{key}-{state.st_size}-{state.st_mtime_ns}"


if __name__ == "__main__":
    main()
