"""Weight slots: where a checkpoint's tensors go, and which share of each a rank keeps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.parallel import Group
from octavo.quants import Quants, Weight


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The place of one checkpoint tensor. `store` is given the whole tensor and keeps this rank's share of it."""

    shape: tuple[int, ...]  # of the whole tensor, as it stands in the checkpoint
    store: Callable[[Any], None]  # a Tensor; where weights come packed and the tensor is a matrix, Quants
    is_optional: bool = False
    is_elsewhere: bool = False  # other ranks keep it: this one need not be given it


WeightSlots = dict[str, WeightSlot]  # checkpoint name → slot


def share(tensor: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's share of a whole tensor along `dim`, as a view: share_size of it, or what is left for the last ranks."""
    extent = tensor.shape[dim]
    size = share_size(extent, group)
    first = min(group.rank * size, extent)
    return tensor.narrow(dim, first, min(size, extent - first))


def share_size(extent: int, group: Group) -> int:
    """What each rank makes room for: equal on all of them, so the last may hold padding."""
    return -(-extent // group.size)


def fill_share(target: torch.Tensor, tensor: torch.Tensor, group: Group) -> None:
    """Put this rank's share of the whole tensor's rows into `target`, and zeros where the last ranks have none."""
    mine = share(tensor, 0, group)
    target[: len(mine)].copy_(mine)
    target[len(mine) :].zero_()


def share_rows(weight: Weight, group: Group) -> Weight:
    """This rank's share of the rows: share_size of them, or what is left for the last ranks."""
    if isinstance(weight, Quants):
        return weight if group.size == 1 else Quants(weight.type, share(weight.rows, 0, group), columns=weight.columns)
    return share(weight, 0, group)


def share_columns(weight: Weight, group: Group) -> Weight:
    """This rank's share of each row: decoded where the cut would go through a quant."""
    if isinstance(weight, Quants):
        size = share_size(weight.shape[1], group)
        mine = weight.narrow_columns(group.rank * size, size)
        if mine is not None:
            return mine
    return share(plain(weight), 1, group)


def plain(weight: Weight) -> torch.Tensor:
    return weight.dequantise() if isinstance(weight, Quants) else weight


def unsharded(name: str, target: torch.Tensor) -> WeightSlots:
    """The slot of a tensor that every rank keeps whole."""
    return {name: WeightSlot(tuple(target.shape), lambda tensor: _copy(target, tensor))}


def _copy(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor)


def check_shares(size: int, **extents: int) -> None:
    """Every extent must split into `size` equal shares: else a ConfigError with the sizes that would work."""
    if all(extent % size == 0 for extent in extents.values()):
        return
    bad = ", ".join(f"{name} {extent}" for name, extent in extents.items() if extent % size)
    good = [n for n in range(1, min(extents.values()) + 1) if all(extent % n == 0 for extent in extents.values())]
    raise ConfigError(
        f"--tensor-parallel-size {size} does not divide this model's {bad}; sizes that work: "
        + ", ".join(map(str, good))
    )


def fill(slots: WeightSlots, tensors: Iterator[tuple[str, Weight]], is_ignored: Callable[[str], bool]) -> None:
    """Put every tensor into its slot. Missing, unexpected or mis-shaped ones are named in a ConfigError."""
    open_slots = dict(slots)
    unexpected: list[str] = []
    for name, tensor in tensors:
        slot = open_slots.pop(name, None)
        if slot is None:
            if not is_ignored(name):
                unexpected.append(name)
        elif tuple(tensor.shape) != slot.shape:
            raise ConfigError(
                f"the checkpoint's tensor {name} has shape {list(tensor.shape)}, its config asks for {list(slot.shape)}: "
                "config.json and weights do not belong together"
            )
        else:
            slot.store(tensor)
    missing = [name for name, slot in open_slots.items() if not (slot.is_optional or slot.is_elsewhere)]
    if missing:
        raise ConfigError(
            f"the checkpoint lacks {_listed(missing)}: it is incomplete, or not of the family config.json names"
        )
    if unexpected:
        raise ConfigError(f"the checkpoint holds {_listed(unexpected)}, which its config does not account for")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {shown}{more}"
