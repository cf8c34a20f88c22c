"""act(gate) * up for a product that holds gate and up side by side, in one pass over memory."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.errors import ConfigError
from octavo.kernels.triton.runtime.chip import starts_early
from octavo.kernels.triton.runtime.launch import Launcher

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


@triton.jit  # type: ignore[untyped-decorator]
def activate(x, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation of float32 numbers. The products apply it to their sums before rounding."""
    if NAME == "silu":
        return x * tl.sigmoid(x)
    elif NAME == "gelu_tanh":
        # 0.5 (1 + tanh u) is sigmoid(2u); 1.5957… is 2 sqrt(2/π).
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(NAME == "gelu")
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit  # type: ignore[untyped-decorator]
def _gate_mul(  # type: ignore[no-untyped-def]
    gate_up,  # [T, 2 I], rows stride apart
    out,  # [T, I] contiguous
    inner,
    stride,
    BLOCK: tl.constexpr,
    NAME: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < inner
    gate = tl.load(gate_up + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + inner + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * inner + column, (activate(gate, NAME) * up).to(out.dtype.element_ty), mask=mask)


_launch_gate_mul = Launcher(_gate_mul)


def gate_mul(gate_up: torch.Tensor, name: str, *, pdl: bool = False) -> torch.Tensor:
    """[T, 2 I] → [T, I]: the named activation of the first half, times the second half; in float32, rounded once."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation {name!r} has no kernel; use one of {', '.join(ACTIVATIONS)}")
    num_rows, width = gate_up.shape
    inner = width // 2
    assert width == 2 * inner and gate_up.stride(1) == 1
    out = torch.empty((num_rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    # Few rows: 8 numbers per thread, for as many programs as possible. Many rows: 16, to have more bytes in flight.
    block = min(1 << (inner - 1).bit_length(), 512 if num_rows <= 64 else 2048)
    pdl = pdl and starts_early(gate_up.device)
    _launch_gate_mul(
        (num_rows, -(-inner // block), 1),
        (gate_up, out, inner, gate_up.stride(0)),
        (block, name, pdl),
        {"num_warps": 2 if num_rows <= 64 else 4, "launch_pdl": True}
        if pdl
        else {"num_warps": 2 if num_rows <= 64 else 4},
    )
    return out
