"""A weight as the native CPU kernels stream it, and the products with it.
Knows nothing of ranks: it is filled with one rank's share."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.cpu.library import GGUF_KINDS, GROUP, PANEL, Kind, PackedWeight, pack, pack_quantised
from octavo.kernels.cpu.native import Native
from octavo.kernels.cpu.native import Norm as NativeNorm
from octavo.kernels.cpu.ops import Finish
from octavo.layers.context import BuildContext
from octavo.layers.norm import Norm
from octavo.quants import Quants
from octavo.quants.exact import held_exactly

# --quantization → how weights of float types are rounded.
ROUNDED = {"int8": Kind.CODES8, "int4": Kind.CODES4_MINIMUM}
_ACTIVATED = {
    "none": Finish.PLAIN, "gelu_tanh": Finish.GELU, "gelu": Finish.EXACT_GELU, "relu": Finish.RELU,
}  # fmt: skip
_GATED = {"silu": Finish.GATED, "gelu_tanh": Finish.GATED_GELU}


class NativeWeight:
    """W [columns, depth], filled part by part; packed when the last part is in. Parts may be packed differently: a GGUF
    file chooses for each tensor."""

    def __init__(
        self,
        native: Native,
        num_parts: int,
        dtype: torch.dtype,
        quantization: str = "",
        is_one: bool = False,
        decodes: bool = False,
    ) -> None:
        """`decodes`: what comes packed stays so, and is multiplied in float32."""
        self._native, self._decodes = native, decodes
        self._is_one = is_one
        self._dtype = dtype
        self._rounded = ROUNDED.get(quantization)
        self._parts: list[Tensor | Quants | None] = [None] * num_parts
        self._weights: list[PackedWeight] = []

    @classmethod
    def of_parts(cls, context: BuildContext, num_parts: int = 1, is_one: bool = False) -> "NativeWeight":
        """`is_one`: for users that need one product for all parts; those that come packed differently are decoded."""
        assert context.native is not None
        return cls(context.native, num_parts, context.weight_dtype, context.quantization, is_one, context.decodes)

    @classmethod
    def of_vocabulary(cls, context: BuildContext, num_parts: int = 1) -> "NativeWeight":
        """An embedding's or a head's. An error in a logit is an error in the answer, so it is never rounded to 4 bits here."""
        assert context.native is not None
        quantization = "int8" if context.quantization in ROUNDED else ""
        return cls(context.native, num_parts, context.weight_dtype, quantization, decodes=context.decodes)

    def hold_as_one(self) -> None:
        """As is_one, before anything is filled in."""
        self._is_one = True

    def fill(self, part: int, rows: Tensor | Quants) -> None:
        assert self._parts[part] is None
        # Quants are a view of the file, which costs nothing to keep; a reader may write the next tensor over others.
        has_all = self._parts.count(None) == 1
        self._parts[part] = rows if has_all or isinstance(rows, Quants) else rows.clone()
        if has_all:
            self._pack([rows for rows in self._parts if rows is not None])
            self._parts = []

    def _pack(self, parts: Sequence[Tensor | Quants]) -> None:
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

    def _form(self, part: Tensor | Quants) -> tuple[Kind, bool, Tensor]:
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
        """Hold it as what does not come packed is held."""
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

    @property
    def nbytes(self) -> int:
        return sum(weight.memory.nbytes for weight in self._weights)

    # ── use ─────────────────────────────────────────────────────────────────────────────────────────

    def product(
        self, x: Tensor, norm: Norm | None = None, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """norm(x) · Wᵀ + bias + residual; the residual is changed, and is the result."""
        x, before = self._before(x, norm)
        return self._native.linear(x, self._weights, norm=before, bias=bias, residual=residual)

    def activated(self, x: Tensor, norm: Norm | None, bias: Tensor | None, activation: str) -> Tensor:
        """activation(norm(x) · Wᵀ + bias)."""
        x, before = self._before(x, norm)
        return self._native.linear(x, self._weights, norm=before, bias=bias, finish=_ACTIVATED[activation])

    def can_gate(self, activation: str, bias: Tensor | None) -> bool:
        """Whether gated() can: else product() and what torch does with it."""
        if activation not in _GATED or bias is not None:
            return False
        return self._is_one_gate() or activation == "silu"

    def gated(self, x: Tensor, norm: Norm | None, activation: str) -> Tensor:
        """activation(gate) · up of norm(x), where W is the gate's columns and then up's."""
        x, before = self._before(x, norm)
        if self._is_one_gate():
            return self._native.linear(x, self._weights, norm=before, finish=_GATED[activation])
        return self._native.gate(self._native.linear(x, self._weights, norm=before))

    def _is_one_gate(self) -> bool:
        return len(self._weights) == 1 and self._weights[0].num_columns % (2 * PANEL) == 0

    def embed(self, ids: Tensor, factor: float = 1.0) -> Tensor:
        (table,) = self._weights
        return self._native.embed(ids, table, factor)

    def _before(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, NativeNorm | None]:
        if norm is None or norm.native is not None:
            return x, None if norm is None else norm.native
        return norm(x), None


def hold_alike(weights: Sequence[NativeWeight]) -> None:
    """For kernels that take many in one form: where some are packed in another way than the rest, or not at all, all are decoded."""
    if len({packed.kind for weight in weights for packed in weight.packed}) > 1:
        for weight in weights:
            weight.decode()
