"""Read safetensors files as a stream of named tensors: mapped on a CPU, through pinned buffers for a GPU. Torch is imported
by the methods that return tensors, not on construction."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import SafetensorError, safe_open

from octavo.errors import ConfigError, quote
from octavo.weights.sources.folder import WeightFiles, find_weights

if TYPE_CHECKING:
    import torch

    from octavo.device import Device
    from octavo.quants import QuantSizes
    from octavo.weights.pinned_reader import Region

# stored type → (bytes of an element, torch's name, the arithmetic type that holds it; "": not a weight)
_TYPES = {
    "F64": (8, "float64", "float32"), "F32": (4, "float32", "float32"),
    "F16": (2, "float16", "float16"), "BF16": (2, "bfloat16", "bfloat16"),
    "I64": (8, "int64", ""), "I32": (4, "int32", ""), "I16": (2, "int16", ""), "I8": (1, "int8", ""),
    "U8": (1, "uint8", ""), "BOOL": (1, "bool", ""),
}  # fmt: skip
# … and types that are weights only together with other tensors of a quantised checkpoint
QUANTISED_TYPES = {"F8_E4M3": (1, "float8_e4m3fn", ""), "F8_E5M2": (1, "float8_e5m2", "")}
_KNOWN_TYPES = _TYPES | QUANTISED_TYPES
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_MAX_ELEMENTS = 2**63 - 1  # of a shape without its zeros
_SMALL = 1 << 20  # bytes: the largest tensor that small() reads


def all_wanted(name: str) -> bool:
    """Read every tensor."""
    return True


@dataclass(frozen=True, slots=True)
class Entry:
    """The header entry of one tensor."""

    type: str  # of _KNOWN_TYPES
    shape: tuple[int, ...]
    path: Path
    offset: int  # of its first byte in the file

    @property
    def arithmetic(self) -> str:
        """The arithmetic type that holds it; "": not a weight by itself."""
        return _KNOWN_TYPES[self.type][2]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _KNOWN_TYPES[self.type][0]


class SafetensorsFiles:
    """A reader of safetensors files. The constructor reads headers and checks sizes, so that a damaged file is refused
    before memory is allocated. `is_quantised`: allow QUANTISED_TYPES too."""

    packed_types: frozenset[str] = frozenset()
    packing_label = ""

    def __init__(self, folder: Path, is_quantised: bool = False) -> None:
        files = find_weights(folder)
        self._plan: list[tuple[Path, tuple[str, ...]]] = []
        self.entries: dict[str, Entry] = {}
        for path in files.paths:
            there = _entries(path)
            names = _wanted(tuple(there), path, files)
            for name in names:
                if name in self.entries:
                    first = self.entries[name].path
                    raise ConfigError(f"{name} is both in {first} and in {path}: keep one of the files")
                _require_known(name, there[name], _KNOWN_TYPES if is_quantised else _TYPES)
                self.entries[name] = there[name]
            self._plan.append((path, names))
        self.num_bytes = sum(entry.num_bytes for entry in self.entries.values())
        bytes_of: Counter[str] = Counter()
        for entry in self.entries.values():
            bytes_of[entry.arithmetic] += entry.num_bytes
        del bytes_of[""]
        if not bytes_of and not is_quantised:
            raise ConfigError(f"{folder} holds safetensors files without a weight in them: fetch them again")
        self.stored_dtype = bytes_of.most_common(1)[0][0] if bytes_of else "float32"

    def held_bytes(self, itemsize: int, sizes: QuantSizes) -> int:
        return sum(math.prod(entry.shape) * itemsize for entry in self.entries.values() if entry.arithmetic)

    def small(self, name: str) -> bytes:
        """The bytes of a small tensor that is needed before weights are read."""
        entry = self.entries[name]
        if entry.num_bytes > _SMALL:
            raise ConfigError(
                f"{entry.path}: tensor {name} has {entry.num_bytes} bytes, more than the {_SMALL} expected"
            )
        with open(entry.path, "rb") as file:
            file.seek(entry.offset)
            return file.read(entry.num_bytes)

    def tensors(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        keep_packed: bool = False,
        is_wanted: Callable[[str], bool] = all_wanted,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor), floating-point tensors converted to `dtype`. A tensor may be a view of the file: copy what
        you keep. `keep_packed` has no effect: none of these files holds packed weights."""
        return _converted(self.stored(device, is_wanted), dtype)

    def stored(
        self, device: torch.device | str, is_wanted: Callable[[str], bool] = all_wanted
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in the stored types."""
        from octavo.device import device_of

        if str(device) == "meta":
            return self._outlines()
        place = device_of(device)
        return self._read_ahead(place, 0, is_wanted) if place.is_cuda else self._mapped(is_wanted)

    def _mapped(self, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
        for path, names in self._plan:
            wanted = [name for name in names if is_wanted(name)]
            if not wanted:
                continue
            with _opened(path, "pt") as file:
                for name in wanted:
                    yield name, file.get_tensor(name)

    def _outlines(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        for name, entry in self.entries.items():
            yield name, torch.empty(entry.shape, dtype=torch_type(entry), device="meta")

    def read_ahead(
        self, device: Device, dtype: torch.dtype, chunk_bytes: int = 0
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Like tensors(), through a ring of pinned buffers to any device. `chunk_bytes`: size of one buffer; 0: the
        default."""
        return _converted(self._read_ahead(device, chunk_bytes), dtype)

    def regions(self) -> list[Region]:
        """The place of each tensor, in file order, so that neighbours are read together."""
        from octavo.weights.pinned_reader import Region

        ordered = sorted(self.entries.items(), key=lambda named: (named[1].path, named[1].offset))
        return [Region(name, e.path, e.offset, torch_type(e), e.shape) for name, e in ordered]

    def _read_ahead(
        self, device: Device, chunk_bytes: int = 0, is_wanted: Callable[[str], bool] = all_wanted
    ) -> Iterator[tuple[str, torch.Tensor]]:
        from octavo.weights import pinned_reader

        regions = [region for region in self.regions() if is_wanted(region.name)]
        return pinned_reader.read_ahead(regions, device, chunk_bytes or pinned_reader.CHUNK_BYTES)


def torch_type(entry: Entry) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, torch_name(entry))
    return found


def torch_name(entry: Entry) -> str:
    return _KNOWN_TYPES[entry.type][1]


def _converted(tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


def _opened(path: Path, framework: str) -> Any:
    try:
        return safe_open(path, framework=framework)
    except SafetensorError as error:
        raise ConfigError(f"{path} is truncated or corrupt ({error}): fetch it again") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def _entries(path: Path, most: int = _MAX_HEADER_BYTES) -> dict[str, Entry]:
    """Read a file's header, of at most `most` bytes. A file is a length of 8 bytes, a JSON header, then the tensors' bytes.

    The library would check sizes and offsets too, but no other thread of the process runs while it reads a long header."""
    try:
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            header_len = int.from_bytes(file.read(8), "little")
            if header_len > num_bytes - 8:
                raise ValueError(f"it has {num_bytes} bytes, too few for a header of {header_len}")
            if header_len > most:
                raise ConfigError(
                    f"{path} has a header of {header_len} bytes, more than {most}: it is corrupt, or no adapter"
                )
            header = _read_header(file.read(header_len))
        _check_places(header, num_bytes - 8 - header_len)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is truncated or corrupt ({error}): fetch it again") from error
    return {
        name: Entry(found.dtype, found.shape, path, 8 + header_len + found.data_offsets[0])
        for name, found in header.items()
    }


class _Described(msgspec.Struct, gc=False):
    """A tensor, as a header describes it. Missing members get values that _check_places() refuses."""

    dtype: str = ""
    shape: tuple[int, ...] = (-1,)
    data_offsets: tuple[int, int] = (-1, -1)


def _check_places(header: dict[str, _Described], num_bytes: int) -> None:
    """Tensors must lie one after the other, with no gap, and fill the file. Raises ValueError."""
    end = 0
    for name, found in sorted(header.items(), key=lambda named: named[1].data_offsets):
        first, last = found.data_offsets
        if first != end or not first <= last <= num_bytes:
            raise ValueError(
                f"tensor {quote(name)} has the bytes {quote(first)} to {quote(last)} of {num_bytes}; they should begin at {end}"
            )
        # A type that is not known has no size here: _require_known() refuses such a tensor.
        known = _KNOWN_TYPES.get(found.dtype)
        if not found.dtype or (known and _num_elements(found.shape, num_bytes) * known[0] != last - first):
            raise ValueError(f"tensor {quote(name)} has {last - first} bytes, which do not fit its type and shape")
        end = last
    if end != num_bytes:
        raise ValueError(f"its tensors have {end} bytes, and {num_bytes} are there")


def _num_elements(shape: tuple[int, ...], most: int) -> int:
    """How many elements a tensor has; -1: more than `most`, or too large a shape. Numbers in a header may be long, and many."""
    product, is_empty = 1, 0 in shape
    for size in shape:
        product *= size or 1
        if not 0 < product <= (_MAX_ELEMENTS if is_empty else most):
            return -1
    return 0 if is_empty else product


def _read_header(text: bytes) -> dict[str, _Described]:
    """Raises ValueError, also for duplicate names: readers could disagree on which entry counts.

    A header may have tens of thousands of tensors, and other threads of the process wait while it is read. One typed
    call takes less than half the time of json with a check of names, so json is used only where a name may be there twice."""
    try:
        header = msgspec.json.decode(text, type=dict[str, _Described])
        # An escape could write the same word in another way.
        count, members = len(header) - ("__metadata__" in header), (b'"data_offsets"', b'"dtype"', b'"shape"')
        if b"\\" not in text and all(text.count(each) == count for each in members):
            header.pop("__metadata__", None)
            return header
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    try:
        named = json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(named, dict):
        raise ValueError("its header is not an object")
    named.pop("__metadata__", None)
    "".join(named).encode()  # half a pair of surrogates is no name
    try:
        return msgspec.convert(named, dict[str, _Described])
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def read_entries(path: Path, max_header_bytes: int) -> dict[str, Entry]:
    """The tensors of one file that are stored in types that can be read. Raises ConfigError, also for a header that is longer."""
    entries = _entries(path, max_header_bytes)
    for name, entry in entries.items():
        _require_known(name, entry, _TYPES)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate names: readers could disagree on which entry counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it names {name} twice")
    return found


def _wanted(there: tuple[str, ...], path: Path, files: WeightFiles) -> tuple[str, ...]:
    if files.names is None:
        return there
    wanted = files.names[path]
    missing = sorted(set(wanted) - set(there))
    if missing:
        raise ConfigError(f"{path} lacks the tensor {missing[0]} that the index puts there: fetch both again")
    return wanted


def _require_known(name: str, entry: Entry, types: Collection[str]) -> None:
    if entry.type not in types:
        raise ConfigError(
            f"{entry.path}: tensor {name} is stored as {entry.type}, which cannot be read; "
            "pass a checkpoint in F32, F16 or BF16, or a GGUF file"
        )
