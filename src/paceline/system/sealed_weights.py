"""Safetensors files with a checksum of their own, among their metadata: flipped bits are found before weights are used.

No torch here: `paceline list` checks files, and torch takes seconds to import.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.system.strict_json import from_json, to_json

SEAL = "sha256"
_METADATA = "__metadata__"
_MAX_HEADER = 100_000_000  # as safetensors allows


def seal_weights(content: bytes) -> bytes:
    """Return the bytes of a safetensors file with a checksum of its header and tensors in its metadata."""
    header, data = _parse(content)
    metadata = {**header.get(_METADATA, {}), SEAL: _seal_of(header, data)}
    text = to_json({**header, _METADATA: metadata}).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, data])


def check_weights(path: Path, digest: str | None = None) -> None:
    """Raise ValueError if a file was changed since it was written, or is not the one whose tensors have this digest.

    Files of older versions have no checksum: only `digest` can tell.
    """
    _check_content(path.read_bytes(), digest)


def read_weights(path: Path, sha256: str | None = None) -> bytes:
    """Return the content of a safetensors file, which any program may have written; UserError if it cannot be used.

    Nothing in it is executed, unlike in a pickle. With `sha256`, refuse a file that has another one.
    """
    if path.is_dir():
        raise UserError(f"weights {path} are a folder: give a file in it, as in {path / 'weights.safetensors'}")
    if not path.is_file():
        raise UserError(f"weights {path} do not exist: give a safetensors file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"weights {path} cannot be read: {error.strerror or error}") from None
    try:
        _check_content(content)
    except ValueError as error:
        raise UserError(f"weights {path} cannot be used: {_remedy(content, error)}") from None
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256.lower():
        what = f"weights {path} have the SHA-256 {found[:16]}..., not {sha256[:16]}..."
        raise UserError(f"{what}: the file was changed or replaced; give the one that was meant")
    return content


def _remedy(content: bytes, error: ValueError) -> str:
    if content.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        how = "where you trust it, write safetensors.torch.save_file(torch.load(FILE), 'FILE.safetensors')"
        return f"a file of torch.save is a pickle, which can run code when it is read; {how}"
    return f"{error}; give a whole safetensors file"


def _check_content(content: bytes, digest: str | None = None) -> None:
    header, data = _parse(content)
    found, seal = tensors_sha256(header, data), header.get(_METADATA, {}).get(SEAL)
    if seal is not None and seal != _seal_of(header, data, found):
        raise ValueError("its checksum is wrong")
    if digest is not None and found != digest:
        raise ValueError("its weights are not those of result.json")


def tensors_sha256(header: dict[str, Any], data: memoryview) -> str:
    """Hash all named tensors into one digest, in the order of their names."""
    hashed = hashlib.sha256()
    for name in sorted(header.keys() - {_METADATA}):
        begin, end = header[name]["data_offsets"]
        hashed.update(name.encode() + b"\0")
        hashed.update(data[begin:end])
    return hashed.hexdigest()


def _seal_of(header: dict[str, Any], data: memoryview, digest: str | None = None) -> str:
    metadata = {name: text for name, text in header.get(_METADATA, {}).items() if name != SEAL}
    parts = [metadata, {name: header[name] for name in sorted(header) if name != _METADATA}]
    return hashlib.sha256((to_json(parts) + (digest or tensors_sha256(header, data))).encode()).hexdigest()


def _parse(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header and the bytes of all tensors; raise ValueError unless the tensors fill the file exactly."""
    nbytes = int.from_bytes(content[:8], "little")
    if not 2 <= nbytes <= min(_MAX_HEADER, len(content) - 8):
        raise ValueError("it is not a safetensors file")
    header, data = from_json(content[8 : 8 + nbytes]), memoryview(content)[8 + nbytes :]
    try:
        spans = sorted(tuple(one["data_offsets"]) for name, one in header.items() if name != _METADATA)
        ends = [0, *(end for _, end in spans)]
        whole = [begin for begin, _ in spans] == ends[:-1] and ends[-1] == len(data)
        if not whole or not all(isinstance(text, str) for text in header.get(_METADATA, {}).values()):
            raise ValueError("its tensors do not fill it")
    except (TypeError, KeyError, AttributeError):
        raise ValueError("its header is damaged") from None
    return header, data
