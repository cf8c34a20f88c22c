"""AdapterFile: an adapter on disk, checked as far as that is possible without the base model. Torch is imported by the methods that
return tensors, not on construction."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

MAX_RANK = 256
MAX_PAIRS = 20_000  # of an adapter: more than any model has matrices


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


class AdapterFile(ABC):
    """`pairs`: by the name of the module that they change, as the file has it."""

    def __init__(self, path: Path, pairs: dict[str, Pair]) -> None:
        self.path, self.pairs = path, pairs
        self.num_experts: dict[
            str, int
        ] = {}  # where one tensor has all experts: the name of the one after the last → how many
        if not pairs:
            raise ConfigError(f"{path} holds no matrices of an adapter: it is empty")
        if len(pairs) > MAX_PAIRS:
            raise ConfigError(f"{path} changes {len(pairs)} matrices; at most {MAX_PAIRS} can be changed")
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

    @abstractmethod
    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank] of a module, in the stored types. They may be views of the file."""


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
    if not place.exists():
        raise ConfigError(f"{place} does not exist: an adapter is a PEFT folder or a GGUF file")
    return PeftAdapter(place) if place.is_dir() else GGUFAdapter(place)
