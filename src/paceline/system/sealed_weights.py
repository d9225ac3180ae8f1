"""Safetensors files with a checksum of their own, among their metadata: flipped bits are found before weights are used.

No torch here: `paceline list` checks files, and torch takes seconds to import.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

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
    header, data = _parse(path.read_bytes())
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
