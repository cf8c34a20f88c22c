"""Writes small GGUF files for tests, from plain Python values and raw tensor bytes, independently of Octavo's reader."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# ggml's type ids, repeated here so that an error in the reader's table is found
TYPE_IDS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ4_NL": 20, "IQ4_XS": 23, "I32": 26, "F64": 28, "BF16": 30,
    "TQ1_0": 34, "MXFP4": 39,
}  # fmt: skip


@dataclass(frozen=True)
class Packed:
    """One tensor: `shape` outermost first, `data` as it lies in the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    data: bytes


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: list[Packed], *, alignment: int = 32, version: int = 3
) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, alignment=alignment, version=version))
    return path


def gguf_bytes(metadata: dict[str, Any], tensors: list[Packed], *, alignment: int = 32, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + _value(value)
    data = b""
    for tensor in tensors:
        dims = tuple(reversed(tensor.shape))
        head += _string(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        head += struct.pack("<IQ", TYPE_IDS[tensor.type], len(data))
        data += tensor.data
        data += bytes(-len(data) % alignment)
    return head + bytes(-len(head) % alignment) + data


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", errors="surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """int → uint32 (int64 where it is negative or large), float → float32, and lists of one kind."""
    kind, body = _typed(value)
    return struct.pack("<I", kind) + body


def _typed(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int() if 0 <= value < 2**32:
            return 4, struct.pack("<I", value)
        case int():
            return 11, struct.pack("<q", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _string(value)
        case list():
            items = [_typed(item) for item in value]
            kind = items[0][0] if items else 4
            assert all(item[0] == kind for item in items), "a GGUF array holds one kind"
            return 9, struct.pack("<IQ", kind, len(items)) + b"".join(item[1] for item in items)
    raise TypeError(value)
