"""Download address of each data set, and checksums of the unpacked content of its files.

Checksums are of content, because a repackaged .gz or .tar differs in its headers only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.data.idx import inflate

_PIECE_NBYTES = 1 << 20
_MAX_CONTENT_NBYTES = 1 << 28  # of one unpacked file; the largest official one has 47 MB


@dataclass(frozen=True)
class RemoteFile:
    """One file to download, and the sha256 of each member, by name."""

    name: str
    contents: Mapping[str, str]


@dataclass(frozen=True)
class DownloadSource:
    """The base URL of a data set, with a final slash, and its files."""

    url: str
    files: tuple[RemoteFile, ...]


_FASHION_MNIST = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_MNIST = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
_CIFAR10 = {
    "data_batch_1": "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd",
    "data_batch_2": "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8",
    "data_batch_3": "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9",
    "data_batch_4": "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b",
    "data_batch_5": "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154",
    "test_batch": "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831",
}
_SST5 = {
    "train.txt": "e2f3f41b0b1e6d4dddc0effe3bfc2d27ed8928079aa9a03d652311614fc5feb7",
    "dev.txt": "0e9336aed6e4730e19f58d00a77b3f0297efdb755f7b5e598c98a05e3f97ea40",
    "test.txt": "6e54806dee95cf80cd918e7dfb3f6770f6df24bf826f289a4d1f709e1c8f6761",
}


def _gzipped(checksums: Mapping[str, str]) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(f"{name}.gz", {name: checksum}) for name, checksum in checksums.items())


_FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
SOURCES: dict[str, DownloadSource] = {
    "fashion-mnist": DownloadSource(_FASHION_MNIST_URL, _gzipped(_FASHION_MNIST)),
    "mnist": DownloadSource("https://ossci-datasets.s3.amazonaws.com/mnist/", _gzipped(_MNIST)),
    "cifar10": DownloadSource("https://www.cs.toronto.edu/~kriz/", (RemoteFile("cifar-10-python.tar.gz", _CIFAR10),)),
    "sst5": DownloadSource("https://nlp.stanford.edu/sentiment/", (RemoteFile("trainDevTestTrees_PTB.zip", _SST5),)),
}


def fault(path: Path, file: RemoteFile) -> str | None:
    """Describe what is wrong with the content of `path`, downloaded for `file`; None if it is correct."""
    from paceline.data.cifar import ARCHIVE_ERRORS  # here, because tar and lzma are slow to import
    from paceline.data.sst import ZIP_ERRORS

    try:
        found = dict(_checksums(path, file))
    except (*ARCHIVE_ERRORS, *ZIP_ERRORS) as error:
        return f"a damaged file ({error or 'it ends early'})"
    for name, checksum in file.contents.items():
        if name not in found:
            return f"no {name} in it"
        if found[name] != checksum:
            return f"sha256 {found[name][:16]}... of {name} instead of {checksum[:16]}..."
    return None


def _checksums(path: Path, file: RemoteFile) -> Iterator[tuple[str, str]]:
    """Yield the name and sha256 of each member of a packed file."""
    if file.name.endswith(".zip"):
        from paceline.data.sst import zip_members

        for name, content in zip_members(path):
            yield name, hashlib.sha256(content).hexdigest()
        return
    if ".tar" in file.name:
        from paceline.data.cifar import tar_members

        for name, member in tar_members(path, Path(file.name).suffix):
            yield name, _sha256(iter(lambda member=member: member.read(_PIECE_NBYTES), b""))  # type: ignore[misc]
        return
    with path.open("rb") as packed:
        yield file.name.removesuffix(".gz"), _sha256(inflate(iter(lambda: packed.read(_PIECE_NBYTES), b"")))


def _sha256(pieces: Iterable[bytes]) -> str:
    digest, nbytes = hashlib.sha256(), 0
    for piece in pieces:
        nbytes += len(piece)
        if nbytes > _MAX_CONTENT_NBYTES:
            raise EOFError(f"it unpacks to more than {_MAX_CONTENT_NBYTES} bytes")
        digest.update(piece)
    return digest.hexdigest()
