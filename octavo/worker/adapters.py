"""A rank's adapters: where a model's layers take them, those that are in memory, and which row has which."""

import logging
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.batch import Batch
from octavo.errors import ConfigError
from octavo.kernels.cpu.adapters import AdapterPart
from octavo.layers.experts import Experts
from octavo.layers.linear import Linear, RowLinear
from octavo.layers.model import DecoderModel
from octavo.messages import AdapterLoaded, AdapterRef
from octavo.quants import Weight
from octavo.sampling.state import Ints
from octavo.weights.adapters.adapter_file import AdapterFile, Stored, check_rank, open_adapter, padded_rank, stamp_of
from octavo.weights.adapters.gguf_file import GGUFAdapter
from octavo.weights.methods.base import HeldWeight, Use
from octavo.worker.priority import give_way
from octavo.worker.staging import Staging

if TYPE_CHECKING:
    from octavo.worker.gpu_adapters import HostBlocks
    from octavo.worker.host_copies import HostRoom


class Placement(NamedTuple):
    """Where a part of a module's product is computed on this rank."""

    site: int
    first_column: int  # of the product
    rows: slice | Tensor  # of B, in the order of the product's columns
    num_rows: int
    columns: slice | Tensor | None  # of A that this rank multiplies; None: all
    depth: int  # how many these are


class Target(NamedTuple):
    """A module that adapters may change. Without placements, other ranks compute it."""

    shape: tuple[int, ...]  # of its weight, [out, in]
    placements: list[Placement]


class _Probe:
    """Stands in for a held weight, and notes what is stored in it."""

    def __init__(self, linear: Linear, filled: list[tuple[Linear, int, Tensor]]) -> None:
        self._linear, self._filled = linear, filled

    def fill(self, part: int, rows: Weight) -> None:
        self._filled.append((self._linear, part, cast(Tensor, rows)))


def linears_of(model: DecoderModel) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def experts_of(model: DecoderModel) -> list[tuple[int, Experts]]:
    """The experts of this stage, with the numbers of their layers."""
    found = zip(model.layer_numbers, model.layers, strict=True)
    return [(number, one) for number, layer in found for one in layer.modules() if isinstance(one, Experts)]


class NoRoom(Exception):
    """What is free lies in pieces that are too small: other adapters must go first."""


class HeldAdapter(Protocol):
    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        ...


Adapter = TypeVar("Adapter", bound=HeldAdapter)


class AdapterHolder(Protocol[Adapter]):
    """Holds adapters in the memory of a device, and adds their products to those of steps."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number of an adapter."""
        ...

    def taken_bytes(self, num_bytes: int) -> int:
        """Bytes of memory that an adapter of `num_bytes` takes."""
        ...

    def site_of(self, linear: Linear) -> int | None:
        """The number of its product for adapters; None: none can change it."""

    def sites_of(self, experts: Experts) -> tuple[int, int] | None:
        """The numbers of gate_up and of down for adapters; None: none can change them."""

    def room(self, num_bytes: int) -> "HostRoom | None":
        """Host memory to read an adapter's file into, until free(); None: it is better mapped."""

    def free(self, room: "HostRoom") -> None:
        """Give back what room() gave."""

    def hold(self, sites: Mapping[int, Sequence[AdapterPart]], name: str = "") -> Adapter:
        """Copy an adapter there, and wait until it is there. `sites`: its parts by the number of the product; `name`: of its content. One thread at a
        time, beside steps. Raises NoRoom."""
        ...

    def learn(self, layout: str, sites: Mapping[int, Sequence[AdapterPart]], num_numbers: int) -> None:
        """Learn how files with this layout are held. `sites`: as for one whose numbers are 1, 2, … in int32, in their order in the file, and whose
        scales are the numbers of its pairs."""

    def knows(self, layout: str) -> bool:
        """Whether learn() was called for it, and it was not forgotten."""
        ...

    def place(
        self, layout: str, read: Tensor, dtype: torch.dtype, scales: NDArray[np.float32], name: str
    ) -> Adapter | None:
        """hold() for a file with a layout that was learnt; None: there is none. `read`: its bytes in a room(). `scales`: of each pair, or one for all."""

    def again(self, name: str) -> Adapter | None:
        """An adapter that was held before, from a copy; None: there is none. Raises NoRoom."""

    def release(self, adapter: Adapter) -> None:
        """Free its memory: no step has it any more."""

    def begin(self, adapters: Sequence[Adapter], batch: Batch, staging: Staging) -> None:
        """The operations from now on are of this batch; `adapters`: in the order of batch.adapters."""

    def end(self) -> None:
        """The operations from now on have no adapters."""

    def warm_up(self) -> None:
        """Inside a warm-up: launch every kernel that a step may take."""


def with_other_stages(targets: dict[str, Target], whole: DecoderModel) -> dict[str, Target]:
    """These of one stage, and those of other stages, without placements. `whole`: the model of one rank, without memory."""
    every = targets_of(
        whole,
        [0 if linear.request.use is Use.PRODUCT else None for linear in linears_of(whole)],
        [(0, 0)] * len(experts_of(whole)),
    )
    return {name: Target(target.shape, []) for name, target in every.items()} | targets


def targets_of(
    outline: DecoderModel, numbers: Sequence[int | None], of_experts: Sequence[tuple[int, int] | None] = ()
) -> dict[str, Target]:
    """The modules of a model that adapters may change, by the name of their weight. Found by storing numbers of rows and columns in
    place of weights: an adapter's rows then go the way that the weight's own rows went. `outline`: the model without memory, in which
    nothing can be overwritten. `numbers`: the site of each of its linears; None: it has none. `of_experts`: the sites of gate_up and down of each of
    its experts; empty: adapters change none."""
    filled: list[tuple[Linear, int, Tensor]] = []
    sites: dict[int, int] = {}
    for linear, site in zip(linears_of(outline), numbers, strict=True):
        if site is not None:
            sites[id(linear)] = site
            linear.weight = cast(HeldWeight, _Probe(linear, filled))
    targets: dict[str, Target] = {}
    for name, slot in outline.weight_slots().items():
        if len(slot.shape) != 2 or not name.endswith(".weight"):
            continue
        found = _probed(slot.store, torch.arange(slot.shape[0])[:, None], 1, filled)
        if found is None:
            continue
        placements = []
        for linear, part, rows in found:
            columns, depth = None, slot.shape[1]
            if isinstance(linear, RowLinear):  # its inputs are divided over ranks, not its outputs
                rows = torch.arange(slot.shape[0])[:, None]
                of_columns = _probed(slot.store, torch.arange(slot.shape[1])[None, :], 0, filled)
                assert of_columns is not None
                mine = of_columns[0][2][0].clone()
                columns, depth = _as_slice(mine), len(mine)
            if not len(rows) or not depth:
                continue  # the last ranks may have padding alone
            first = linear.request.rows(part).start
            placement = Placement(sites[id(linear)], first, _as_slice(rows[:, 0].clone()), len(rows), columns, depth)
            placements.append(placement)
        targets[name.removesuffix(".weight")] = Target(slot.shape, placements)
    for (layer, experts), pair in zip(experts_of(outline) if of_experts else (), of_experts, strict=True):
        if pair is not None:
            targets |= _expert_targets(f"model.layers.{layer}.mlp.experts", experts, pair)
    return targets


def _expert_targets(name: str, experts: Experts, sites: tuple[int, int]) -> dict[str, Target]:
    """Each expert's gate, up and down, and its gate and up as one matrix. Columns of a site are those of all experts of this rank."""
    hidden, inner, width = experts.hidden_size, experts.full_inner, experts.inner_size
    mine = experts.inner_numbers()
    count = len(mine)
    rows = (2 * mine, 2 * mine + 1) if experts.alternates else (mine, inner + mine)
    targets: dict[str, Target] = {}
    for expert in range(experts.num_experts):
        of_gate_up: list[Placement] = []
        of_parts: list[list[Placement]] = [[], []]
        of_down: list[Placement] = []
        if expert in experts.held and count:
            first = (expert - experts.held.start) * 2 * width
            if count == width:  # no padding between the two: one part, which reads A once
                of_gate_up.append(Placement(sites[0], first, _as_slice(torch.cat(rows)), 2 * count, None, hidden))
            for part in range(2):
                column = first + part * width
                if count != width:
                    of_gate_up.append(Placement(sites[0], column, _as_slice(rows[part]), count, None, hidden))
                of_parts[part].append(Placement(sites[0], column, _as_slice(mine), count, None, hidden))
            columns = None if count == inner else _as_slice(mine)
            first = (expert - experts.held.start) * hidden
            of_down.append(Placement(sites[1], first, slice(0, hidden), hidden, columns, count))
        targets[f"{name}.{expert}.gate_up_proj"] = Target((2 * inner, hidden), of_gate_up)
        targets[f"{name}.{expert}.gate_proj"] = Target((inner, hidden), of_parts[0])
        targets[f"{name}.{expert}.up_proj"] = Target((inner, hidden), of_parts[1])
        targets[f"{name}.{expert}.down_proj"] = Target((hidden, inner), of_down)
    return targets


def _as_slice(numbers: Tensor) -> slice | Tensor:
    """Numbers that follow each other, as they do in most families, are a slice: a view instead of a copy."""
    first, count = int(numbers[0]) if len(numbers) else 0, len(numbers)
    return slice(first, first + count) if torch.equal(numbers, torch.arange(first, first + count)) else numbers


_MAX_KNOWN = 100_000  # files whose content's id is kept
_ID_LEN = 32  # of a content's id
# To hash at a time: a third of a millisecond on cores that steps need, and on others little less than all: each piece waits for the lock of the
# interpreter.
_MAPPED_BYTES, _READ_BYTES = 2**19, 2**24
_NO_PRODUCT = (RuntimeError, IndexError, AttributeError, AssertionError, TypeError)  # of a table, of experts, …


def _probed(
    store: Callable[[Any], None], numbers: Tensor, dim: int, filled: list[tuple[Linear, int, Tensor]]
) -> list[tuple[Linear, int, Tensor]] | None:
    """What storing these numbers fills; None: no product, or one whose weight is stored in another way than row by row. `dim`: that in
    which there is one number."""
    filled.clear()
    try:
        store(numbers)
    except _NO_PRODUCT:
        return None
    # Of one column, which ranks divide, the first has all.
    is_right = all(
        rows.dim() == 2 and (rows.shape[dim] == 1 or (dim == 1 and isinstance(linear, RowLinear) and not rows.shape[1]))
        for linear, _, rows in filled
    )
    return list(filled) if filled and is_right else None


_EXPERT = re.compile(r"(?P<layer>.+\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(?P<number>\d+)\.(?P<part>\w+)")
_EXPERT_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's


def translated(file: AdapterFile, name: str, model: DecoderModel, family: ModuleType) -> str:
    """A module's name in the model's slots; a name that is none of them where it has none."""
    if isinstance(file, GGUFAdapter):
        gguf_name = getattr(family, "gguf_name", None)
        found = None if gguf_name is None else gguf_name(f"{name}.weight")
        return (found or "").removesuffix(".weight")
    if (expert := _EXPERT.fullmatch(name)) is not None:
        return f"{expert['layer']}.mlp.experts.{expert['number']}.{_EXPERT_NAMES.get(expert['part'], expert['part'])}"
    return model.hf_name(f"{name}.weight").removesuffix(".weight")


def check_fit(
    file: AdapterFile, targets: dict[str, Target], translate: Callable[[AdapterFile, str], str], kind: str
) -> None:
    """Raises ConfigError if an adapter does not fit a model. `kind`: the model's family."""
    for name, pair in file.pairs.items():
        target = targets.get(translate(file, name))
        if target is None:
            raise ConfigError(
                f"{file.path} changes {name[:100]}, which is no matrix of attention or MLP of this {kind} model that adapters can "
                f"change{_trained_on(file)}"
            )
        if (pair.out_features, pair.in_features) != target.shape:
            raise ConfigError(
                f"{file.path}: {name} changes a matrix of {pair.out_features} × {pair.in_features}, and this model's has "
                f"{target.shape[0]} × {target.shape[1]}: it was trained on another base{_trained_on(file)}"
            )
    _check_experts(file, targets, translate)


class _Known(NamedTuple):
    """What is known of files that were read and checked."""

    name: str  # the id of their content
    stored: Stored | None
    layout: str
    scales: NDArray[np.float32]  # of each pair, or one for all


class RankAdapters:
    def __init__(
        self,
        model: DecoderModel,
        outline: DecoderModel,
        family: ModuleType,
        config: dict[str, Any],
        holder: AdapterHolder[Any],
        whole: DecoderModel | None = None,
    ) -> None:
        """`outline`: the model without memory. `config`: the model's. `whole`: the outline of all stages, where this rank has one of several."""
        self._model, self._family, self._config, self._holder = model, family, config, holder
        self.targets = targets_of(
            outline,
            [holder.site_of(linear) for linear in linears_of(model)],
            [holder.sites_of(experts) for _, experts in experts_of(model)],
        )
        if whole is not None:
            self.targets = with_other_stages(self.targets, whole)
        self._loaded: dict[str, HeldAdapter] = {}  # by id
        self._known: dict[str, _Known] = {}  # by AdapterRef.key
        self._num_loads: Counter[str] = Counter()  # of each; several files may have the same content
        self._holding = threading.Lock()
        self._lock = threading.Lock()  # of what is loaded: a step waits for it, but never for copies

    def num_parts(self, num_sites: int) -> list[int]:
        """For each site, the parts that an adapter may have there."""
        counts = Counter(placement.site for target in self.targets.values() for placement in target.placements)
        return [counts[site] for site in range(num_sites)]

    # ── loading, beside steps ──

    def check(self, file: AdapterFile) -> None:
        """Raises ConfigError if the adapter does not fit this model."""
        check_fit(file, self.targets, self._translated, str(self._config.get("model_type", "this")))

    def check_files(self, ref: AdapterRef) -> int:
        """Check an adapter without its numbers. → bytes that it will take here. Raises ConfigError."""
        file = open_adapter(ref.path)
        check_rank(file, ref.max_rank)
        self.check(file)
        return self.held_bytes(file)

    def held_bytes(self, file: AdapterFile) -> int:
        """Bytes of memory that it takes on this rank."""
        count = 0
        for name, pair in file.pairs.items():
            for placement in self.targets[self._translated(file, name)].placements:
                count += padded_rank(pair.rank) * (placement.depth + placement.num_rows)
        return self._holder.taken_bytes(count * self.itemsize)

    @property
    def itemsize(self) -> int:
        return self._holder.itemsize

    def load(self, ref: AdapterRef) -> AdapterLoaded:
        """Read an adapter into memory. Any thread, one at a time; steps go on meanwhile. Raises ConfigError and NoRoom."""
        self._check_stamp(ref)
        # The same files: they were checked, and what they hold is known.
        known = self._known.get(ref.key) if ref.stamp else None
        with self._holding:
            adapter = None if known is None else self._again(known.name)
            if adapter is not None and known is not None:
                return AdapterLoaded(known.name, adapter.nbytes)
            return self._load(ref, known)

    def _check_stamp(self, ref: AdapterRef) -> None:
        if ref.stamp and stamp_of(Path(ref.path)) != ref.stamp:
            raise ConfigError(
                f"the files of adapter {ref.name} ({ref.path}) have changed since it was registered: load it again"
            )

    def _again(self, name: str) -> HeldAdapter | None:
        """An adapter that is in memory, or of which there is a copy."""
        found = self._counted(name, None)
        if found is not None:
            return found
        made = self._holder.again(name)
        return None if made is None else self._counted(name, made)

    def _load(self, ref: AdapterRef, known: "_Known | None") -> AdapterLoaded:
        """Read, check and hold an adapter that is not in memory."""
        file: AdapterFile | None = None
        if known is None or not self._holder.knows(known.layout):
            file = open_adapter(ref.path)
            check_rank(file, ref.max_rank)
            self.check(file)
        stored = file.stored if file is not None else known.stored if known is not None else None
        room = None if stored is None else self._holder.room(stored.num_bytes)
        read: Tensor | None = None  # the file's numbers, in this room
        try:
            if room is not None and stored is not None:
                stored.read_into(room.memory[: stored.num_bytes])
                self._check_stamp(ref)  # they may have changed meanwhile
                read = room.memory[: stored.num_bytes].view(getattr(torch, stored.type))
            if known is None:
                assert file is not None
                known = self._checked(file, read)
            if ref.stamp:
                self._known[ref.key] = known
                if len(self._known) > _MAX_KNOWN:
                    del self._known[next(iter(self._known))]
            adapter = self._counted(known.name, None)
            if adapter is None and room is not None and read is not None:
                made = self._holder.place(known.layout, room.memory, read.dtype, known.scales, known.name)
                adapter = None if made is None else self._counted(known.name, made)
            if adapter is None:
                if file is None:  # its layout would take too much memory
                    file = open_adapter(ref.path)
                if read is not None:
                    file.take_from(read)
                adapter = self._counted(known.name, self._holder.hold(self._parts(file), known.name))
                assert adapter is not None
                if read is not None and not self._holder.knows(known.layout):
                    file.take_from(torch.arange(1, len(read) + 1, dtype=torch.int32))
                    self._holder.learn(known.layout, self._parts(file, is_numbered=True), len(read))
            return AdapterLoaded(known.name, adapter.nbytes)
        finally:
            if room is not None:
                self._holder.free(room)

    def _checked(self, file: AdapterFile, read: Tensor | None) -> "_Known":
        """Check an adapter's numbers, and say what its content is. `read`: its numbers, if they are in memory."""
        _check_numbers(file, read)
        layout = file.layout
        scales = np.array([pair.scale for pair in file.pairs.values()], dtype=np.float32)
        if (scales == scales[0]).all():
            scales = scales[:1]
        exact = [pair.scale for pair in file.pairs.values()]
        if read is None:
            name = _content_id(layout, exact, file.contents(), _MAPPED_BYTES)
        else:
            name = _content_id(layout, exact, iter([read.view(torch.uint8).numpy().data]), _READ_BYTES)
        return _Known(name, file.stored, layout, scales)

    def _parts(self, file: AdapterFile, is_numbered: bool = False) -> dict[int, list[AdapterPart]]:
        """What this rank adds to its products, by their sites. `is_numbered`: the pairs' numbers are their scales."""
        sites: dict[int, list[AdapterPart]] = {}
        for number, (name, pair) in enumerate(file.pairs.items()):
            down, up = file.matrices(name)
            module = self._translated(file, name)
            if isinstance(file, GGUFAdapter):
                up = self._family.gguf_fix(f"{module}.weight", up, self._config)
            for placement in self.targets[module].placements:
                part = AdapterPart(
                    down if placement.columns is None else down[:, placement.columns],
                    up[placement.rows],
                    placement.first_column,
                    float(number) if is_numbered else pair.scale,
                )
                sites.setdefault(placement.site, []).append(part)
        return sites

    def _counted(self, name: str, made: HeldAdapter | None) -> HeldAdapter | None:
        """The adapter of this name, counted once more; `made`, where there is none."""
        with self._lock:
            found = self._loaded.get(name, made)
            if found is not None:
                self._loaded[name] = found
                self._num_loads[name] += 1
            return found

    def load_or_say_why(self, ref: AdapterRef) -> AdapterLoaded | str:
        """load(), or why that cannot be done. Without an id: other adapters must go first."""
        try:
            return self.load(ref)
        except NoRoom:
            return AdapterLoaded("", 0)
        except ConfigError as error:
            return str(error)
        except Exception as error:  # a file may be damaged in ways that are not foreseen: its requests fail, no other
            logging.getLogger("octavo.adapters").exception("adapter %s cannot be loaded", ref.name)
            return f"adapter {ref.name} cannot be loaded: {type(error).__name__}: {error}"

    def forget(self, names: list[str]) -> None:
        """Undo a load of each of these, which no row has. The last one frees its memory."""
        with self._lock:
            for name in names:
                self._num_loads[name] -= 1
                if self._num_loads[name] <= 0:
                    del self._num_loads[name]
                    self._holder.release(self._loaded.pop(name))

    def _translated(self, file: AdapterFile, name: str) -> str:
        return translated(file, name, self._model, self._family)

    # ── steps ──

    @contextmanager
    def of(self, batch: Batch, staging: Staging) -> Iterator[None]:
        """The operations inside are of this batch, and its tokens have adapters."""
        self._holder.begin(self._these(batch.adapters), batch, staging)
        try:
            yield
        finally:
            self._holder.end()

    def warm_up(self) -> None:
        """Inside a warm-up: compile what steps with adapters take."""
        self._holder.warm_up()

    def plan(self, names: Sequence[str], of_rows: Ints) -> "HostBlocks":
        """For a captured step on a GPU. `of_rows` [B]: numbers of these names, −1: none."""
        found: HostBlocks = self._holder.plan(self._these(names), of_rows)  # type: ignore[attr-defined]
        return found

    def _these(self, names: Sequence[str]) -> list[Any]:
        return [self._loaded[name] for name in names]


def _check_experts(file: AdapterFile, targets: dict[str, Target], translate: Callable[[AdapterFile, str], str]) -> None:
    """Where an adapter has all experts in one tensor, their number must be the model's."""
    for module, count in file.num_experts.items():
        if translate(file, module) in targets:  # the one after the last
            raise ConfigError(
                f"{file.path} has {count} experts, and this model has more: it was trained on another base{_trained_on(file)}"
            )


def _trained_on(file: AdapterFile) -> str:
    return f" (its base is {file.base[:100]})" if file.base else ""


def _content_id(layout: str, scales: list[float], contents: Iterator[memoryview], size: int) -> str:
    """Equal for adapters that change answers in the same way. SHA-256, since processors have instructions for it. `size`: bytes to hash at
    a time."""
    whole = sha256(b"octavo adapter")
    whole.update(repr((layout, scales)).encode())
    for content in contents:
        for first in range(0, len(content), size):
            whole.update(content[first : first + size])
            give_way()
    return whole.hexdigest()[:_ID_LEN]


def _check_numbers(file: AdapterFile, read: Tensor | None) -> None:
    """Raises ConfigError where numbers are not finite. `read`: all of them, if they are in memory."""
    if read is not None and _is_finite(read):
        return
    for name in file.pairs:
        if not all(map(_is_finite, file.matrices(name))):
            raise ConfigError(f"{file.path}: {name} has numbers that are not finite: the file is damaged")
        give_way()


def _is_finite(matrix: Tensor) -> bool:
    """By its extremes, in which a NaN stays one: 20 times as fast as asking of each number."""
    return all(math.isfinite(float(extreme)) for extreme in torch.aminmax(matrix))
