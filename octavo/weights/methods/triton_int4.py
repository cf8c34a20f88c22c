"""Weights as 4-bit codes in groups with a scale and a zero, on a GPU: as AWQ, GPTQ and compressed-tensors checkpoints have them, or
rounded so by --quantization int4. Kernels multiply them as they are held; activations keep their 16 bits."""

import torch
from torch import Tensor

from octavo.kernels.device_ops import Activation, NormWeights
from octavo.kernels.torch_ops import activate
from octavo.kernels.triton.elementwise.norm import rms_norm
from octavo.kernels.triton.gemm import int4
from octavo.kernels.triton.gemm.int4_layout import GROUPS, OUTPUTS, Int4Tensor, decode, make_room, store
from octavo.kernels.triton.gemm.stream import can_run
from octavo.quants import ORDERED, Quants, Weight
from octavo.weights.methods.base import HeldWeight, LinearMethod, Method, Settings, Use, WeightRequest, other_kernels
from octavo.weights.methods.triton_bf16 import TritonWeight
from octavo.weights.methods.triton_groups import GroupWeight
from octavo.weights.methods.triton_invariant import InvariantWeight

_TYPES = {"Q4_0": 8, "Q5_0": 16}  # how checkpoints' codes arrive, and the code that stands for 0
_ROUNDED_GROUP = 32  # columns that share a scale with --quantization int4
_AT_ONCE = 1 << 24  # numbers unpacked together: bounds the temporaries


class Int4Weight(HeldWeight):
    """What has no exact 4-bit form (5-bit weights of a GGUF file, say) is held by triton_groups, or in 16 bits where other parts have been
    packed before; the whole of the weight then is."""

    def __init__(self, request: WeightRequest, settings: Settings) -> None:
        super().__init__(settings.ops)
        self._request, self._settings = request, settings
        self._packed: Int4Tensor | None = None
        self._other: TritonWeight | InvariantWeight | GroupWeight | None = None
        self._columns: Tensor | None = None  # of x, in the order in which the codes lie
        self._filled: list[int] = []

    @property
    def nbytes(self) -> int:
        held = self._other if self._other is not None else self._packed
        return (0 if held is None else held.nbytes) + (0 if self._columns is None else self._columns.nbytes)

    @property
    def name(self) -> str:
        return "int4" if self._other is None else self._other.name

    def fill(self, part: int, rows: Weight) -> None:
        if self._other is None:
            columns = rows.columns if isinstance(rows, Quants) else None
            found = self._codes(rows) if self._has_order(columns) else None
            if found is not None and self._make_room(found[2].shape[1]):
                self._columns = None if columns is None else columns.to(self._settings.device)
                self._store(part, *found)
                self._filled.append(part)
                return
            self._give_up(isinstance(rows, Quants))
        assert self._other is not None
        self._other.fill(part, rows)

    def _has_order(self, columns: Tensor | None) -> bool:
        """Whether the codes' columns are in the order of the parts before."""
        if not self._filled or columns is None or self._columns is None:
            return not self._filled or (columns is None) == (self._columns is None)
        return torch.equal(columns.to(self._columns.device), self._columns)

    def _codes(self, rows: Weight) -> tuple[Tensor, Tensor, Tensor] | None:
        device = self._settings.device
        if isinstance(rows, Quants):
            return _exact_codes(Quants(rows.type, rows.rows.to(device))) if rows.type in _TYPES else None
        if self._settings.quantization != "int4":
            return None
        return round_to_codes(rows.to(device), _ROUNDED_GROUP)

    def _make_room(self, num_groups: int) -> bool:
        """Whether there is room for weights with so many groups in a row."""
        request, settings = self._request, self._settings
        group_size = request.in_features // num_groups
        if self._packed is None:
            is_interleaved = request.is_gated and request.out_features % (2 * OUTPUTS) == 0
            self._packed = make_room(
                request.out_features, request.in_features, group_size, settings.dtype, settings.device, is_interleaved
            )
        return self._packed.group_size <= group_size

    def _store(self, part: int, codes: Tensor, zeros: Tensor, scales: Tensor) -> None:
        assert self._packed is not None
        times = self._request.in_features // self._packed.group_size // scales.shape[1]
        zeros, scales = (numbers.repeat_interleave(times, dim=1) for numbers in (zeros, scales))
        store(self._packed, self._request.rows(part).start, codes, zeros, scales)

    def _give_up(self, is_packed: bool) -> None:
        """Hold the weight in another form from now on."""
        if self._packed is None and is_packed:
            self._other = GroupWeight(self._request, self._settings)
            return
        make = InvariantWeight if self._settings.ops.is_invariant else TritonWeight
        self._other = make(self._request, self._settings)
        if self._packed is not None:
            decoded = decode(self._packed)
            if self._columns is not None:
                decoded = torch.empty_like(decoded).index_copy_(1, self._columns, decoded)
            for part in self._filled:
                self._other.fill(part, decoded[self._request.rows(part)].to(self._settings.dtype))
        self._packed = self._columns = None

    def product(
        self, x: Tensor, norm: NormWeights | None = None, bias: Tensor | None = None, activation: Activation = "none"
    ) -> Tensor:
        if self._other is not None:
            return self._other.product(x, norm, bias, activation)
        return activate(self._multiply(x, norm, bias, None, None), activation)

    def product_add(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if self._other is not None:
            return self._other.product_add(x, bias, residual)
        return self._multiply(x, None, bias, residual, None)

    def gated(self, x: Tensor, norm: NormWeights | None, bias: Tensor | None, activation: Activation) -> Tensor | None:
        if self._other is not None:
            return self._other.gated(x, norm, bias, activation)
        assert self._packed is not None
        if activation not in int4.ACTIVATIONS or not self._packed.is_interleaved:
            return None
        return self._multiply(x, norm, bias, None, activation)

    def _multiply(
        self, x: Tensor, norm: NormWeights | None, bias: Tensor | None, residual: Tensor | None, gated: str | None
    ) -> Tensor:
        assert self._packed is not None, "it is filled first"
        x, before = self._rms_normed(x, norm)
        if self._columns is not None:
            if before is not None:
                x, before = rms_norm(x, *before, is_fixed=self._settings.ops.is_invariant, pdl=True), None
            x = x.index_select(1, self._columns)
        return int4.int4_linear(
            x, self._packed, bias=bias, norm=before, residual=residual, gated=gated, pdl=True,
            is_fixed=self._settings.ops.is_invariant,
        )  # fmt: skip

    def warm_up_gate(self, activation: Activation, has_bias: bool, max_rows: int) -> None:
        if self._other is not None:
            self._other.warm_up_gate(activation, has_bias, max_rows)
            return
        assert self._packed is not None
        bias = self._settings.empty(self._request.out_features) if has_bias else None
        for num_rows in int4.row_counts(max_rows):
            x = self._settings.empty(num_rows, self._request.in_features)
            if self.gated(x, None, bias, activation) is None:
                self.product(x, None, bias)


def _exact_codes(weight: Quants) -> tuple[Tensor, Tensor, Tensor] | None:
    """Codes [N, K] uint8, zeros and scales [N, K / group] that are the weight exactly; None: a group spans more than 16 numbers.
    A checkpoint's groups are larger than a quant: they are found again by their equal scales."""
    rows, width = weight.shape
    scales = weight.stored.view(rows, width // 32, -1)[:, :, :2].contiguous().view(torch.float16)[:, :, 0]
    group_size = 32
    while group_size < GROUPS[-1] and width % (2 * group_size) == 0 and torch.equal(scales[:, 0::2], scales[:, 1::2]):
        group_size, scales = 2 * group_size, scales[:, 0::2].contiguous()
    codes = torch.empty((rows, width), dtype=torch.uint8, device=weight.stored.device)
    zeros = torch.empty_like(scales, dtype=torch.int32)
    step = max(1, _AT_ONCE // width)
    for first in range(0, rows, step):
        some = slice(first, first + step)
        numbers = _numbers(weight.stored[some].view(-1, width // 32, weight.stored.shape[1] * 32 // width), weight.type)
        groups = numbers.view(-1, width // group_size, group_size)
        if weight.type == "Q4_0":
            zero = torch.full(groups.shape[:2], 8, dtype=torch.int8, device=codes.device)
        else:
            least, most = torch.aminmax(groups, dim=2)
            zero = (-least).clamp_(min=0)
            if bool((most + zero > 15).any()):
                return None
        codes[some] = (groups + zero.unsqueeze(2)).flatten(1).to(torch.uint8)
        zeros[some] = zero
    return codes, zeros, scales


def _numbers(quants: Tensor, type: str) -> Tensor:
    """Quants [N, B, bytes] → their codes less the middle one, int8 [N, 32 B]."""
    nibbles = quants[:, :, -16:]
    codes = torch.cat((nibbles & 15, nibbles >> 4), dim=2)
    if type == "Q5_0":
        shifts = torch.arange(8, dtype=torch.uint8, device=quants.device)
        codes = codes | (quants[:, :, 2:6, None] >> shifts & 1).flatten(2) << 4
    return (codes.view(torch.int8) - _TYPES[type]).flatten(1)


def round_to_codes(rows: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """[N, K] → codes, zeros and scales: each group's range, with 0 in it, in 16 steps, of which one is 0."""
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    all_zeros, all_scales = [], []
    step = max(1, _AT_ONCE // rows.shape[1])
    for first in range(0, len(rows), step):
        groups = rows[first : first + step].float().view(-1, rows.shape[1] // group_size, group_size)
        least, most = (numbers for numbers in torch.aminmax(groups, dim=2))
        least, most = least.clamp_(max=0.0), most.clamp_(min=0.0)
        # In float16 the step is at least its smallest number, which also keeps it from being 0.
        scales = ((most - least) / 15).clamp_(min=6e-8).to(torch.float16)
        exact = scales.float()
        zeros = (-least / exact).round_().clamp_(0, 15)
        found = (groups / exact.unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).clamp_(0, 15)
        codes[first : first + step] = found.flatten(1).to(torch.uint8)
        all_zeros.append(zeros.to(torch.int32))
        all_scales.append(scales)
    return codes, torch.cat(all_zeros), torch.cat(all_scales)


# Of groups of 32, as GGUF files have them: with groups of 128 it is 17. An order of columns is 8 bytes for each.
_PACKINGS = {f"{type}{order}": (32, 20) for type in _TYPES for order in ("", ORDERED)}


def supports(request: WeightRequest, settings: Settings) -> str | None:
    if settings.ops.kernels != "triton":
        return other_kernels(settings)
    if settings.quantization != "int4" and not settings.packed_types & _PACKINGS.keys():
        return "neither asked for nor in the checkpoint"
    if request.use is not Use.PRODUCT:
        return f"a {request.use.value} stays more exact"
    if settings.dtype not in (torch.float16, torch.bfloat16):
        return "the product takes inputs of 16 bits"
    if request.in_features % _ROUNDED_GROUP or request.out_features % 8:
        return (
            f"the product wants multiples of 8 by {_ROUNDED_GROUP}, not {request.out_features} by {request.in_features}"
        )
    if settings.ops.is_invariant and not can_run(settings.device) and settings.device.type == "cuda":
        return "--deterministic has a kernel for it only on GPUs of NVIDIA's Hopper generation"
    return None


LINEAR: LinearMethod = Method("triton_int4", supports, Int4Weight, packings=_PACKINGS)
