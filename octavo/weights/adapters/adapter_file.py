"""AdapterFile: an adapter on disk, checked as far as that is possible without the base model. Torch is imported by the methods that
return tensors, not on construction."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

MAX_RANK = 256
MAX_PAIRS = 65_536  # of an adapter: 61 layers of 256 experts with three matrices each have 46,848


def padded_rank(rank: int) -> int:
    """Ranks are held as whole panels of 16."""
    return -(-rank // 16) * 16


@dataclass(frozen=True, slots=True)
class Pair:
    """The two matrices of one module: A [rank, in], B [out, rank]."""

    rank: int
    in_features: int
    out_features: int
    scale: float

    @property
    def num_weights(self) -> int:
        """Numbers that are held in memory for it."""
        return padded_rank(self.rank) * (self.in_features + self.out_features)


class Stored(NamedTuple):
    """The bytes of a file that are all numbers of an adapter, and nothing else."""

    path: Path
    offset: int
    num_bytes: int
    type: str  # torch's name

    def read_into(self, memory: Tensor) -> None:
        """In few calls: each gives up the lock of the interpreter, and has to get it again. Raises ConfigError."""
        view: memoryview = memory.numpy().data
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset)
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise ConfigError(f"{self.path} is truncated: fetch it again")
                    view = view[count:]
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror or error}") from error


class AdapterFile(ABC):
    """`pairs`: by the name of the module that they change, as the file has it."""

    def __init__(self, path: Path, pairs: dict[str, Pair]) -> None:
        self.path, self.pairs = path, pairs
        # Where one tensor has all experts: the name of the one after the last → how many.
        self.num_experts: dict[str, int] = {}
        check_count(path, len(pairs))
        worst = max(pairs, key=lambda name: pairs[name].rank)
        if pairs[worst].rank > MAX_RANK:
            raise ConfigError(
                f"{path}: {worst} has rank {pairs[worst].rank}; ranks up to {MAX_RANK} are supported, so this adapter is not"
            )

    @property
    def max_rank(self) -> int:
        return max(pair.rank for pair in self.pairs.values())

    @property
    def num_weights(self) -> int:
        return sum(pair.num_weights for pair in self.pairs.values())

    @property
    @abstractmethod
    def base(self) -> str:
        """The name of the base model that the file gives; "": none."""

    @property
    def layout(self) -> str:
        """Equal for files whose matrices are alike, and in the same places: only numbers and scales differ."""
        named = [(name, pair.rank) for name, pair in self.pairs.items()]
        return sha256(repr((named, self.places)).encode()).hexdigest()

    @property
    @abstractmethod
    def places(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Names, types and shapes of its tensors, in the order of contents()."""

    @abstractmethod
    def contents(self) -> Iterator[memoryview]:
        """The bytes of all of its tensors. They are not copied: a copy would read the file while it holds the lock of the interpreter, which
        hashing does not."""

    @property
    def stored(self) -> Stored | None:
        """None: its numbers have several types, or do not lie in one piece."""
        return None

    def take_from(self, numbers: Tensor) -> None:
        """Take matrices from here instead of the file: those of `stored`, of any type."""
        raise NotImplementedError

    @abstractmethod
    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank] of a module, in the stored types. They may be views of the file."""


def check_count(path: Path, num_pairs: int) -> None:
    """Raises ConfigError for an adapter that changes nothing, or too much. Before the pairs are looked at one by one."""
    if not num_pairs:
        raise ConfigError(f"{path} holds no matrices of an adapter: it is empty")
    if num_pairs > MAX_PAIRS:
        raise ConfigError(f"{path} changes {num_pairs} matrices; at most {MAX_PAIRS} can be changed")


def check_rank(file: AdapterFile, max_rank: int) -> None:
    """Raises ConfigError for an adapter whose rank is above --max-lora-rank."""
    if file.max_rank > max_rank:
        raise ConfigError(
            f"{file.path} has rank {file.max_rank}; the limit is {max_rank} (--max-lora-rank, at most {MAX_RANK})"
        )


def stamp_of(path: Path) -> str:
    """What changes when the files of an adapter do: sizes and times. Raises ConfigError where there are none."""
    try:
        entries = sorted(path.iterdir()) if path.is_dir() else [path]
        found = [(entry.name, entry.stat()) for entry in entries if entry.name.startswith("adapter_") or entry == path]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    return " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in found)


def open_adapter(path: str | os.PathLike[str]) -> AdapterFile:
    """Open a PEFT folder or a GGUF file, and check it. Raises ConfigError with one line that says what is wrong."""
    from octavo.weights.adapters.gguf_file import GGUFAdapter
    from octavo.weights.adapters.peft_folder import PeftAdapter

    place = Path(path)
    try:
        mode = place.stat().st_mode
    except FileNotFoundError:
        raise ConfigError(f"{place} does not exist: an adapter is a PEFT folder or a GGUF file") from None
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise ConfigError(f"cannot read {place}: {error.strerror or error}") from None
    if stat.S_ISDIR(mode):
        return PeftAdapter(place)
    if not stat.S_ISREG(mode):  # to open a pipe would wait for its writer
        raise ConfigError(f"{place} is neither a folder nor a file: an adapter is a PEFT folder or a GGUF file")
    return GGUFAdapter(place)
