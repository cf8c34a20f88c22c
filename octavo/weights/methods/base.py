"""HeldWeight and LinearMethod: a weight as it lies in memory, and a way of holding weights that a rank may pick.

A layer asks the registry to hold a weight of some shape for some use, fills it part by part with this rank's share, and
then asks the held weight for products. It never asks how the weight is held.

There are four kinds of held weights: of a product (HeldWeight), of an embedding (HeldTable), one for each head (HeldHeads),
and of all experts of a layer (HeldExperts). A method offers those that it can hold."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.device_ops import Activation, DeviceOps, NormWeights
from octavo.quants import Quants, QuantSizes, Weight

RequestKind = TypeVar("RequestKind")
HeldKind = TypeVar("HeldKind", bound="Held")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a rank has settled before its layers are built: where and in which types it computes, and what was asked for."""

    device: torch.device
    dtype: torch.dtype  # of activations, and of weights that no method holds otherwise
    ops: DeviceOps
    quantization: str = ""  # "" as they come, "fp8", "int8", "int4"
    weight_dtype: torch.dtype = torch.float32  # in which the native CPU kernels hold weights that are not packed
    packed_types: frozenset[str] = frozenset()
    """Types of the Quants that weights may arrive as, of quants.PACKED_TYPES; empty: all arrive as tensors. Which of the
    weights arrive packed is known only when they are filled: a method that cannot hold what arrives decodes it."""
    decodes: bool = False
    """The native CPU kernels multiply packed weights in float32, as if they had been decoded."""
    adapts: bool = False
    """Adapters may change the products (--enable-lora)."""
    around: "Callable[[HeldWeight, WeightRequest], HeldWeight] | None" = None
    """A method around those of products: with adapters on a GPU (triton_adapters.py)."""
    has_triton: bool = False
    """Triton kernels run on this device, even where the ops are torch's: those of experts take float32 too."""

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Use(Enum):
    PRODUCT = "product"
    VOCABULARY = "vocabulary"  # a head's: an error in a logit is an error in the answer, so it stays more exact
    ROUTER = "router"  # never rounded: a small error can select another expert


@dataclass(frozen=True, slots=True)
class WeightRequest:
    """A weight [sum of part_sizes, in_features] of this rank. Parts are checkpoint tensors whose rows are joined."""

    part_sizes: tuple[int, ...]  # rows of each part
    in_features: int
    use: Use = Use.PRODUCT
    is_gated: bool = False  # the two parts are gate and up
    adds_residual: bool = True  # False: another rank does, and this one's product is added to it

    @property
    def out_features(self) -> int:
        return sum(self.part_sizes)

    def rows(self, part: int) -> slice:
        first = sum(self.part_sizes[:part])
        return slice(first, first + self.part_sizes[part])


class Held(ABC):
    """What a layer keeps of its weights."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory that it takes, once it is filled."""

    @property
    @abstractmethod
    def name(self) -> str:
        """How the numbers are held, in words."""

    @property
    def numerics(self) -> frozenset[str]:
        """What the fingerprint says of it: a name for each form of its numbers whose products have bits of their own."""
        return frozenset({self.name})


class HeldWeight(Held):
    """W [out, in] of one rank. Biases belong to the layer and come with each product."""

    def __init__(self, ops: DeviceOps) -> None:
        self._ops = ops

    @abstractmethod
    def fill(self, part: int, rows: Weight) -> None:
        """`rows`: this rank's rows of the part; where they are fewer than the part has, the rest are zeros. Each part once."""

    @abstractmethod
    def product(
        self, x: Tensor, norm: NormWeights | None = None, bias: Tensor | None = None, activation: Activation = "none"
    ) -> Tensor:
        """[T, in] → activation(norm(x) · Wᵀ + bias), [T, out]."""

    @abstractmethod
    def product_add(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """[T, in] → x · Wᵀ + bias + residual, [T, out]. The residual may be changed, and may be the result."""

    def gated(self, x: Tensor, norm: NormWeights | None, bias: Tensor | None, activation: Activation) -> Tensor | None:
        """activation(gate) · up of norm(x) · Wᵀ + bias, [T, out / 2], as part of the product. None: not offered for this
        activation and number of rows; use product(), then product_after_gate() of the next weight."""
        return None

    def product_after_gate(
        self, gate_up: Tensor, activation: Activation, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """product_add of activation(gate) · up, where gate_up [T, 2 in] has the two side by side, and may be changed."""
        return self.product_add(self._ops.gate(gate_up, activation), bias, residual)

    @property
    def plain(self) -> Tensor | None:
        """W itself, for kernels that multiply with it among other things. None: it is not held plain, or not alone."""
        return None

    def warm_up_gate(self, activation: Activation, has_bias: bool, max_rows: int) -> None:
        """Inside a warm-up: run every kernel that gated() may take for up to max_rows rows and no trial step meets."""

    def _normed(self, x: Tensor, norm: NormWeights | None) -> Tensor:
        return x if norm is None else self._ops.norm(x, norm)

    def _rms_normed(self, x: Tensor, norm: NormWeights | None) -> tuple[Tensor, tuple[Tensor, float] | None]:
        """For kernels that take an RMSNorm with the product, as its weight and epsilon: a LayerNorm is computed here."""
        if norm is None:
            return x, None
        return (x, (norm.weight, norm.epsilon)) if norm.bias is None else (self._ops.norm(x, norm), None)


class HeldTable(Held):
    """An embedding's rows [num_rows, width]: a weight of which single rows are read."""

    @abstractmethod
    def fill(self, part: int, rows: Weight) -> None:
        """As HeldWeight.fill."""

    @abstractmethod
    def look_up(self, ids: Tensor, factor: float = 1.0) -> Tensor:
        """[T] → the rows times factor, [T, width], a new tensor."""

    @abstractmethod
    def as_head(self) -> HeldWeight:
        """The same rows as the weight of a head that is tied to them, once they are filled: one copy serves both, where the
        layout of the product can be read row by row."""


@dataclass(frozen=True, slots=True)
class HeadsRequest:
    num_heads: int  # of this rank
    num_outputs: int
    num_inputs: int


class HeldHeads(Held):
    """A weight [outputs, inputs] for each head of this rank."""

    @abstractmethod
    def fill(self, head: int, rows: Tensor) -> None: ...

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """[T, H, inputs] → [T, H, outputs]."""


# ── experts ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Gate:
    """gate · sigmoid(alpha · gate) · (up + offset), with gate cut off above the limit and up on both sides of it."""

    alpha: float = 1.0
    limit: float = 0.0  # 0: none
    offset: float = 0.0

    @property
    def is_swiglu(self) -> bool:
        return self == Gate()  # silu(gate) · up

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.is_swiglu:
            return F.silu(gate) * up
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + self.offset)


@dataclass(frozen=True, slots=True)
class ExpertsRequest:
    """The experts of a layer that this rank has: a share of each one's inner width, or some of them as a whole. Biases are filled by the
    layer."""

    num_experts: int
    hidden_size: int
    inner_size: int  # of this rank
    gate: Gate
    gate_up_bias: Tensor | None = None  # [experts, 2 inner]
    down_bias: Tensor | None = None  # [experts, hidden]
    packed_type: str = (
        ""  # type of Quants in which all experts arrive, if it is in settings.packed_types; "": not known yet
    )
    num_routed: int = 0  # experts that tokens are routed to, of which num_experts are here; 0: all are
    first: int = 0  # the first of them that is here

    @property
    def is_part(self) -> bool:
        """Whether other ranks have other experts."""
        return self.num_routed > self.num_experts


class RouterWeights(NamedTuple):
    weight: Tensor  # [routed experts, hidden]
    bias: Tensor | None


class HeldExperts(Held):
    @abstractmethod
    def fill_gate_up(self, expert: int, part: int, rows: Weight) -> None:
        """Part 0: this rank's rows of the gate, [inner, hidden]; 1: of up. Where they are fewer, the rest are zeros."""

    @abstractmethod
    def fill_down(self, expert: int, columns: Weight) -> None:
        """This rank's columns of down, [hidden, inner]."""

    def alike(self, stack: Weight) -> Weight:
        """All experts' rows in one form, in which a part of them can be given to the two methods above."""
        return stack

    @abstractmethod
    def weighted_sum(
        self, x: Tensor, logits: Tensor, num_chosen: int, is_normalised: bool, residual: Tensor | None
    ) -> Tensor:
        """x [T, hidden], logits [T, routed experts] → residual + the weighted sum over the chosen experts that are here, [T, hidden]. The
        residual may be changed, and may be the result. `is_normalised`: the weights of the chosen ones add up to 1."""

    def sum_of_few(
        self, x: Tensor, norm: NormWeights, router: RouterWeights, num_chosen: int, is_normalised: bool
    ) -> Tensor | None:
        """x + the weighted sum for norm(x), with logits by the router: x is changed and returned. None, and x as it was, where that is not
        faster than norm, router and weighted_sum() one after the other."""
        return None

    def warm_up(self, num_routed: int, num_chosen: int, is_normalised: bool, max_rows: int) -> None:
        """Inside a warm-up: run every kernel that weighted_sum() may take for up to max_rows rows and no trial step meets."""


# ── methods ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Method(Generic[RequestKind, HeldKind]):
    """A way of holding weights on some devices.

    A method around another one (an adapter's, say) has that one hold the weight, and returns what it holds around it."""

    name: str
    supports: Callable[[RequestKind, Settings], str | None]
    """None: it can hold such a weight here, and multiply with it; else why not."""
    hold: Callable[[RequestKind, Settings], HeldKind]
    """Makes room for the weight. Only where supports() says None."""
    packings: QuantSizes = field(default_factory=dict)
    """Types of Quants that it holds without decoding them, each with the (weights, bytes) of a quant in its memory."""
    keeps_up: bool = True
    """For many rows its products are about as fast as those of weights in 16 bits."""


LinearMethod = Method[WeightRequest, HeldWeight]
TableMethod = Method[WeightRequest, HeldTable]
HeadsMethod = Method[HeadsRequest, HeldHeads]
ExpertsMethod = Method[ExpertsRequest, HeldExperts]


def supports_all(request: object, settings: Settings) -> None:
    """Support everything: the last method of an order."""
    return None


def other_kernels(settings: Settings) -> str:
    """Why a method of other kernels does not hold anything here."""
    return f"{settings.ops.kernels} computes here"


def decoded(weight: Weight) -> Tensor:
    return weight.dequantise() if isinstance(weight, Quants) else weight


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
