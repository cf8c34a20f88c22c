"""y = x · Wᵀ for 1 to 8 rows and 4-bit weights (`int4_layout`), on compute capability 8.0 and later. `int4` chooses when to use it.

The warps of a program lie side by side along K. A thread loads 32 codes at once, makes pairs of 16-bit floats of them with
few integer instructions, and gives them to the tensor cores as they are: no code passes through shared memory. Scales are
applied to float32 sums of a group, so weights are never rounded. With programmatic dependent launch a program loads its
first tiles of W before it waits for the kernel that makes x."""

# Gluon supports tuple + tuple but not (*tuple, more), and allows a variable's tuple to grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.elementwise.activation_gluon import activate
from octavo.kernels.triton.gemm.int4_layout import Int4Tensor
from octavo.kernels.triton.runtime.launch import Launcher

MAX_ROWS = 8


class FewChoice(NamedTuple):
    pairs: int  # of eight outputs, twice, per program
    num_warps: int  # side by side along K, a block of 128 columns each
    ahead: int  # tiles loaded before the first is used
    x_ahead: int = 1  # and of x
    chains: int = (
        1  # of matrix instructions that wait for each other, in a tile: 1 or 2; groups smaller than 128 have their own
    )


@gluon.constexpr_function
def _products_asm(first, count, is_bf16):  # type: ignore[no-untyped-def]
    """Assembly of `count` matrix instructions of 16 columns each, from the first-th of a block on.

    Operands: 4 sums out; words of outputs g (4) and g + 8 (4); 4 times 4 pairs of x; the zeros of g (2) and g + 8 (2)."""
    kind = "bf16" if is_bf16 else "f16"
    magic = "0x43004300" if is_bf16 else "0x64006400"
    lines = ["{", ".reg .b32 t, a0, a1, a2, a3;", ".reg .b32 za, zb;", "mov.b32 za, $28;", "mov.b32 zb, $30;"]
    for number in range(4):
        lines.append(f"mov.f32 ${number}, 0f00000000;")
    for step in range(first, first + count):
        high, j = step // 4, step % 4
        for name, word, zero in (
            ("a0", 4 + high, "za"),
            ("a1", 8 + high, "zb"),
            ("a2", 6 + high, "za"),
            ("a3", 10 + high, "zb"),
        ):
            source = f"${word}"
            if j:
                lines.append(f"shr.u32 t, ${word}, {4 * j};")
                source = "t"
            lines.append(f"lop3.b32 {name}, {source}, 0x000F000F, {magic}, 0xEA;")
            lines.append(f"sub.{kind}x2 {name}, {name}, {zero};")
        b0, b1 = f"${12 + 4 * j + high}", f"${12 + 4 * j + 2 + high}"
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            f"{{$0, $1, $2, $3}}, {{a0, a1, a2, a3}}, {{{b0}, {b1}}}, {{$0, $1, $2, $3}};"
        )
    return "\n".join([*lines, "}"])


CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 28))


@gluon.jit
def _load(pointers, is_there, MASKED: gl.constexpr):  # type: ignore[no-untyped-def]
    if MASKED:
        return gl.load(pointers, mask=is_there, other=0)
    else:
        return gl.load(pointers)


@gluon.jit
def _load_weights(codes, scales, t, index, BLOCKS: gl.constexpr, SUB: gl.constexpr, MASKED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Tile t: words [PAIRS, KB · 128] of the first outputs and of the second ones, and SUB scales of each."""
    FIRST: gl.constexpr = t * index.shape[0] // 128
    block = FIRST + index // 128
    is_there = gl.expand_dims(block < BLOCKS, 0)
    words = codes + gl.expand_dims(block * 1024 + index % 128, 0)
    tile = (_load(words, is_there, MASKED), _load(words + 128, is_there, MASKED))
    for sub in gl.static_range(SUB):
        # Sums 0 and 1 of a thread belong to output g, 2 and 3 to g + 8.
        place = (block * SUB + sub) * 64 + index % 128 // 16 + index % 4 // 2 * 8
        tile = tile + (_load(scales + gl.expand_dims(place, 0), is_there, MASKED),)
    return tile


@gluon.jit
def _load_x(x, t, index, x_stride, num_rows, K: gl.constexpr, MASKED: gl.constexpr, FRAGMENTS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Four tensors [1, KB · 128] of neighbouring columns of x, two in a word: nibble j of W's word belongs to the j-th. A thread
    has the row of its number among outputs; rows beyond the last repeat the last one."""
    row = gl.minimum(index % 128 // 16, num_rows - 1)
    pairs = ()
    if FRAGMENTS:
        # A thread's 16 pairs of a block lie side by side.
        at = t * (index.shape[0] // 2) + index // 128 * 64 + index // 4 % 4 * 16 + index % 4
        place = gl.max_contiguous(gl.multiple_of(row * x_stride + at, 4), 4)
        for j in gl.static_range(4):
            pairs = pairs + (gl.expand_dims(_load(x + place + 4 * j, at * 2 < K, MASKED), 0),)
    else:
        v = index % 4
        column = t * index.shape[0] + index // 128 * 128 + v % 2 * 64 + v // 2 * 8 + index // 4 % 4 * 2
        place = x + row * x_stride + column // 2
        for j in gl.static_range(4):
            pairs = pairs + (gl.expand_dims(_load(place + 8 * j, column + 16 * j < K, MASKED), 0),)
    return pairs


@gluon.jit
def _accumulate(sums, tile, pairs, SUB: gl.constexpr, CHAINS: gl.constexpr, IS_BF16: gl.constexpr):  # type: ignore[no-untyped-def]
    """Add one tile's products: four sums of a thread are rows 2 q and 2 q + 1 of output g, then of g + 8."""
    EACH: gl.constexpr = 4 if CHAINS == 2 and SUB == 1 else 8 // SUB
    for sub in gl.static_range(SUB):
        meta = tile[2 + sub]
        zeros = (meta >> 16) & 0xFFFF
        zeros = zeros | (zeros << 16)
        # Of the four, the first is that of output g and the last that of g + 8.
        products = gl.inline_asm_elementwise(
            _products_asm(8 // SUB * sub, EACH, IS_BF16),
            CONSTRAINTS,
            [tile[0], tile[1], pairs[0], pairs[1], pairs[2], pairs[3], zeros],
            dtype=gl.float32,
            is_pure=True,
            pack=4,
        )
        if EACH != 8 // SUB:
            products += gl.inline_asm_elementwise(
                _products_asm(4, 4, IS_BF16),
                CONSTRAINTS,
                [tile[0], tile[1], pairs[0], pairs[1], pairs[2], pairs[3], zeros],
                dtype=gl.float32,
                is_pure=True,
                pack=4,
            )
        scale = (meta & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        sums += scale * products
    return sums


@gluon.jit(do_not_specialize=["num_rows"])
def _few_product(  # type: ignore[no-untyped-def]
    x,  # [M, K / 2] int32: pairs of 16-bit floats, rows x_stride apart
    codes,  # [N / 64, BLOCKS, 1024] int32
    scales,  # [N / 64, BLOCKS, SUB, 64] int32
    out,  # [M, n]; the same tensor as residual, if there is one
    residual,  # [M, n] or None
    bias,  # [n], or [2 n] with a gate; or None
    num_rows,
    n,
    x_stride,
    K: gl.constexpr,
    BLOCKS: gl.constexpr,
    SUB: gl.constexpr,
    PAIRS: gl.constexpr,
    KB: gl.constexpr,  # blocks of K side by side, one for each warp
    AHEAD: gl.constexpr,
    X_AHEAD: gl.constexpr,
    CHAINS: gl.constexpr,
    FRAGMENTS: gl.constexpr,  # the columns of x are in the order in which threads need them
    INTERLEAVED: gl.constexpr,  # outputs of gate and up alternate, in eights
    GATED: gl.constexpr,  # an activation's name, or ""
    PDL: gl.constexpr,
):
    HALF: gl.constexpr = out.dtype.element_ty
    IS_BF16: gl.constexpr = HALF == gl.bfloat16  # noqa: SIM300
    TILES: gl.constexpr = (BLOCKS + KB - 1) // KB
    HELD: gl.constexpr = 2 + SUB  # tensors of a tile
    MASKED: gl.constexpr = BLOCKS % KB != 0
    RAGGED: gl.constexpr = BLOCKS % KB != 0 or K % 128 != 0
    layout: gl.constexpr = gl.BlockedLayout([PAIRS, 4], [1, 32], [1, KB], [1, 0])
    index = gl.arange(0, KB * 128, gl.SliceLayout(0, layout))
    pair = gl.expand_dims(gl.program_id(0) * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(1, layout)), 1)
    of_block = (pair // 4).to(gl.int64)
    codes += of_block * (BLOCKS * 1024) + pair % 4 * 256
    scales += of_block * (BLOCKS * SUB * 64) + pair % 4 * 16
    tiles = ()
    for t in gl.static_range(AHEAD):
        tiles = tiles + _load_weights(codes, scales, t, index, BLOCKS, SUB, MASKED)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = gl.full([PAIRS, KB * 128], 0.0, gl.float32, layout)
    inputs = ()
    for t in gl.static_range(X_AHEAD):
        inputs = inputs + _load_x(x, t, index, x_stride, num_rows, K, RAGGED, FRAGMENTS)
    for t in gl.static_range(TILES):
        current = inputs[:4]
        inputs = inputs[4:]
        if t + X_AHEAD < TILES:
            inputs = inputs + _load_x(x, t + X_AHEAD, index, x_stride, num_rows, K, RAGGED, FRAGMENTS)
        sums = _accumulate(sums, tiles[:HELD], current, SUB, CHAINS, IS_BF16)
        tiles = tiles[HELD:]
        if t + AHEAD < TILES:
            tiles = tiles + _load_weights(codes, scales, t + AHEAD, index, BLOCKS, SUB, MASKED)
    # [PAIRS, KB, g 8, q 4, half 2, row 2] → [PAIRS, g, row 8, half]
    y = gl.sum(gl.reshape(sums, [PAIRS, KB, 128]), 1)
    y = gl.permute(gl.reshape(y, [PAIRS, 8, 4, 2, 2]), [0, 1, 2, 4, 3])
    first, second = gl.split(gl.reshape(y, [PAIRS, 8, 8, 2]))
    shape: gl.constexpr = first.type.layout
    octet = gl.program_id(0) * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(1, gl.SliceLayout(2, shape)))
    output = gl.expand_dims(octet * (8 if INTERLEAVED else 16), 1) + gl.expand_dims(
        gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, shape))), 0
    )
    output = gl.expand_dims(output, 2)
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, shape)))
    row = gl.expand_dims(gl.expand_dims(row, 0), 1)
    if GATED != "":
        if bias is not None:
            first += gl.load(bias + output, mask=output < n, other=0.0).to(gl.float32)
            second += gl.load(bias + n + output, mask=output < n, other=0.0).to(gl.float32)
        _finish(activate(first, GATED) * second, out, residual, None, num_rows, n, row, output)
    else:
        _finish(first, out, residual, bias, num_rows, n, row, output)
        other = output + (n // 2 if INTERLEAVED else 8)
        _finish(second, out, residual, bias, num_rows, n, row, other)


@gluon.jit
def _finish(y, out, residual, bias, num_rows, n, row, output):  # type: ignore[no-untyped-def]
    mask = (row < num_rows) & (output < n)
    place = row * n + output
    if bias is not None:
        y += gl.load(bias + output, mask=output < n, other=0.0).to(gl.float32)
    if residual is not None:
        y += gl.load(residual + place, mask=mask, other=0.0).to(gl.float32)
    gl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


_launch = Launcher(_few_product)


def few_product(
    x: torch.Tensor,
    weight: Int4Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    gated: str,
    choice: FewChoice,
    pdl: bool,
    in_fragments: bool = False,
) -> None:
    """x [M, K] · weight [N, K]ᵀ into out [M, N or N/2]; see `int4.int4_linear`. in_fragments: x is as rms_norm() leaves it."""
    num_rows, k = x.shape
    assert not in_fragments or k % 128 == 0
    assert num_rows <= MAX_ROWS and x.stride(1) == 1 and x.stride(0) % 2 == 0
    blocks = weight.codes.shape[1]
    num_warps = min(choice.num_warps, triton.next_power_of_2(blocks))
    num_tiles = triton.cdiv(blocks, num_warps)
    options = {"num_warps": num_warps}
    if pdl:
        options["launch_pdl"] = True
    _launch(
        (weight.codes.shape[0] * 4 // choice.pairs, 1, 1),
        (x.view(torch.int32), weight.codes, weight.scales, out, residual, bias, num_rows, out.shape[1], x.stride(0) // 2),
        (
            k, blocks, weight.subgroups, choice.pairs, num_warps, min(choice.ahead, num_tiles), min(choice.x_ahead, num_tiles), choice.chains,
            in_fragments, weight.is_interleaved, gated, pdl,
        ),
        options,
    )  # fmt: skip
