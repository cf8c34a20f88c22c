"""Weights as the native CPU kernels stream them: in float32, bfloat16, rounded to 8 or 4 bits, or with the codes of a GGUF
file or of a quantised folder. Activations are float32."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.cpu.adapters import NO_SITE
from octavo.kernels.cpu.device_ops import NativeOps
from octavo.kernels.cpu.library import GGUF_KINDS, GROUP, PANEL, Kind, PackedWeight, pack, pack_quantised
from octavo.kernels.cpu.ops import Finish
from octavo.kernels.device_ops import Activation, NormWeights
from octavo.kernels.torch_ops import activate
from octavo.quants import Quants, Weight
from octavo.quants.exact import HELD_SIZES, held_exactly
from octavo.weights.methods.base import (
    HeadsMethod,
    HeadsRequest,
    Held,
    HeldHeads,
    HeldTable,
    HeldWeight,
    LinearMethod,
    Method,
    Settings,
    TableMethod,
    Use,
    WeightRequest,
    other_kernels,
)

# --quantization → how weights of float types are rounded.
ROUNDED = {"int8": Kind.CODES8, "int4": Kind.CODES4_MINIMUM}
_FINISHES: dict[Activation, Finish] = {
    "none": Finish.PLAIN, "gelu_tanh": Finish.GELU, "gelu": Finish.EXACT_GELU, "relu": Finish.RELU,
}  # fmt: skip
_GATED: dict[Activation, Finish] = {"silu": Finish.GATED, "gelu_tanh": Finish.GATED_GELU}


class NativeHeld(Held):
    """What a model holds for the native kernels."""

    @property
    @abstractmethod
    def bytes_of_kinds(self) -> Counter[Kind]: ...

    @property
    def nbytes(self) -> int:
        return self.bytes_of_kinds.total()

    @property
    def name(self) -> str:
        return " and ".join(sorted({kind_name(kind) for kind in self.bytes_of_kinds}))

    @property
    def numerics(self) -> frozenset[str]:
        # Weights that are decoded to float32 give the same bits as float32.
        return frozenset("float32" if kind.is_decoded else kind.name.lower() for kind in self.bytes_of_kinds)


def kind_name(kind: Kind) -> str:
    if not kind.is_packed:
        return kind.name.lower()
    return f"{kind.name.removeprefix('CODES')[0]} bits"


class NativeWeight(NativeHeld, HeldWeight, HeldTable):
    """W [columns, depth]; packed when the last part is in. Parts may be packed differently: a GGUF file chooses for each
    tensor."""

    def __init__(
        self,
        ops: NativeOps,
        part_sizes: Sequence[int],
        dtype: torch.dtype,
        quantization: str = "",
        is_one: bool = False,
        decodes: bool = False,
    ) -> None:
        """`is_one`: for users that need one product for all parts; those that come packed differently are decoded.
        `decodes`: what comes packed stays so, and is multiplied in float32."""
        super().__init__(ops)
        self._native, self._decodes = ops.native, decodes
        self._is_one = is_one
        self._dtype = dtype
        self._rounded = ROUNDED.get(quantization)
        self._part_sizes = part_sizes
        self._parts: list[Weight | None] = [None] * len(part_sizes)
        self._weights: list[PackedWeight] = []
        self.site = NO_SITE  # its number for adapters

    def fill(self, part: int, rows: Weight) -> None:
        assert self._parts[part] is None
        rows = _padded(rows, self._part_sizes[part])
        # Quants are a view of the file, which costs nothing to keep; a reader may write the next tensor over others.
        has_all = self._parts.count(None) == 1
        self._parts[part] = rows if has_all or isinstance(rows, Quants) else rows.clone()
        if has_all:
            self._pack([rows for rows in self._parts if rows is not None])
            self._parts = []

    def _pack(self, parts: Sequence[Weight]) -> None:
        groups: list[tuple[Kind, bool, list[Tensor]]] = []
        for part in parts:
            kind, is_rounded, rows = self._form(part)
            if groups and groups[-1][:2] == (kind, is_rounded) and groups[-1][2][0].shape[1] == rows.shape[1]:
                groups[-1][2].append(rows)
            else:
                groups.append((kind, is_rounded, [rows]))
        if self._is_one and len(groups) > 1:
            return self._pack([part.dequantise() if isinstance(part, Quants) else part for part in parts])
        for kind, is_rounded, tensors in groups:
            rows = tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)
            packed = (pack_quantised if is_rounded else pack)(self._native.threads, rows, kind)
            self._weights.append(packed)

    def _form(self, part: Weight) -> tuple[Kind, bool, Tensor]:
        """How the part is held, whether it is rounded to that here, and its rows."""
        if isinstance(part, Quants):
            kept = held_exactly(part)
            if kept is not None:
                kind = GGUF_KINDS[kept.type]
                return kind.decoded if self._decodes else kind, False, kept.rows
            part = part.dequantise()
        if self._rounded is not None and part.shape[1] % GROUP == 0:
            return self._rounded, True, part.float()
        if self._dtype == torch.bfloat16:
            return Kind.BFLOAT16, False, part.to(torch.bfloat16)
        return Kind.FLOAT32, False, part.float()

    def decode(self) -> None:
        """Replace packed parts by decoded ones, held like weights that did not arrive packed."""
        parts = [weight.columns(torch.arange(weight.num_columns)) for weight in self._weights]
        self._weights = []
        self._pack(parts)

    @property
    def bytes_of_kinds(self) -> Counter[Kind]:
        counted: Counter[Kind] = Counter()
        for weight in self._weights:
            counted[weight.kind] += weight.memory.nbytes
        return counted

    @property
    def packed(self) -> Sequence[PackedWeight]:
        """What the parts became: one, unless they came packed differently."""
        return self._weights

    # ── use ─────────────────────────────────────────────────────────────────────────────────────────

    def product(
        self, x: Tensor, norm: NormWeights | None = None, bias: Tensor | None = None, activation: Activation = "none"
    ) -> Tensor:
        finish = _FINISHES.get(activation)
        if finish is None:
            return activate(self._native.linear(x, self._weights, norm=norm, bias=bias, site=self.site), activation)
        return self._native.linear(x, self._weights, norm=norm, bias=bias, finish=finish, site=self.site)

    def product_add(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return self._native.linear(x, self._weights, bias=bias, residual=residual, site=self.site)

    def gated(self, x: Tensor, norm: NormWeights | None, bias: Tensor | None, activation: Activation) -> Tensor | None:
        if activation not in _GATED or bias is not None:
            return None
        if len(self._weights) == 1 and self._weights[0].num_columns % (2 * PANEL) == 0:
            return self._native.linear(x, self._weights, norm=norm, finish=_GATED[activation], site=self.site)
        if activation != "silu":
            return None
        return self._native.gate(self._native.linear(x, self._weights, norm=norm, site=self.site))

    def look_up(self, ids: Tensor, factor: float = 1.0) -> Tensor:
        (table,) = self._weights
        return self._native.embed(ids, table, factor)

    def as_head(self) -> HeldWeight:
        return self


def _padded(rows: Weight, size: int) -> Weight:
    if rows.shape[0] == size:
        return rows
    stored = rows.rows if isinstance(rows, Quants) else rows
    stored = torch.cat((stored, stored.new_zeros(size - len(stored), *stored.shape[1:])))  # quants of zeros are zeros
    return Quants(rows.type, stored, columns=rows.columns) if isinstance(rows, Quants) else stored


class NativeHeads(NativeHeld, HeldHeads):
    def __init__(self, request: HeadsRequest, settings: Settings) -> None:
        one = WeightRequest((request.num_outputs,), request.num_inputs)
        self._members = [hold(one, settings) for _ in range(request.num_heads)]

    @property
    def bytes_of_kinds(self) -> Counter[Kind]:
        return sum((member.bytes_of_kinds for member in self._members), Counter[Kind]())

    def fill(self, head: int, rows: Tensor) -> None:
        self._members[head].fill(0, rows.contiguous())

    def product(self, x: Tensor) -> Tensor:
        # One by one: the kernels give a token the same bits in any batch.
        return torch.stack([member.product(x[:, head]) for head, member in enumerate(self._members)], dim=1)


def hold(request: WeightRequest, settings: Settings) -> NativeWeight:
    ops, dtype, quantization = native_ops(settings), settings.weight_dtype, settings.quantization
    match request.use:
        case Use.ROUTER:
            return NativeWeight(ops, request.part_sizes, dtype)
        case Use.VOCABULARY:  # never rounded to 4 bits here
            quantization = "int8" if quantization in ROUNDED else ""
            return NativeWeight(ops, request.part_sizes, dtype, quantization, decodes=settings.decodes)
        case Use.PRODUCT:
            # Gate and up of two kinds would not be gated by float32's own kernel.
            is_one = request.is_gated and settings.decodes
            weight = NativeWeight(ops, request.part_sizes, dtype, quantization, is_one, settings.decodes)
            if settings.adapts:
                weight.site = ops.native.new_site()
            return weight


def native_ops(settings: Settings) -> NativeOps:
    assert isinstance(settings.ops, NativeOps)
    return settings.ops


def supports(request: object, settings: Settings) -> str | None:
    return None if isinstance(settings.ops, NativeOps) else other_kernels(settings)


LINEAR: LinearMethod = Method("cpu_native", supports, hold, packings=HELD_SIZES)
TABLE: TableMethod = Method("cpu_native", supports, hold, packings=HELD_SIZES)
HEADS: HeadsMethod = Method("cpu_native", supports, NativeHeads)
