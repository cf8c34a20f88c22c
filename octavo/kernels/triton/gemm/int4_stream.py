"""y = x · Wᵀ for 1 to 8 rows and weights of 4 bits (`int4_layout`), by programs that stay for many outputs. `int4` chooses when to use it.

The warps of a program lie side by side along K. A warp keeps its part of x in registers where that fits, and as soon as it has
used a tile of W it loads the same tile for the outputs that come next: while it computes, the memory is busy. Codes
become pairs of floats by an AND and a shift for each half word: they are multiplied as 1024 + code (odd nibbles: 1024 + 16 code,
with x / 16), and sums of x correct that."""

# Gluon supports tuple + tuple but not (*tuple, more), and allows a variable's tuple to grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc,var-annotated"

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.gemm.int4_layout import Int4Tensor
from octavo.kernels.triton.gemm.stream import HELD_TILES, MAX_ROWS, StreamChoice, options
from octavo.kernels.triton.gemm.stream_parts import ask, end, load, mma
from octavo.kernels.triton.runtime.launch import Launcher


@gluon.constexpr_function
def _sums_of_x_asm(first, count, is_bf16, odd_only):  # type: ignore[no-untyped-def]
    """The sums of a group's columns of x, or 960 times those of odd nibbles. Operands: 4 sums out; 4 times 4 pairs of x."""
    kind = "bf16" if is_bf16 else "f16"
    lines = ["{", ".reg .b32 one, odd;", f"mov.b32 one, {'0x3F803F80' if is_bf16 else '0x3C003C00'};"]
    # Odd nibbles meet x / 16.
    lines.append(f"mov.b32 odd, {'0x73807380' if odd_only else '0x3F803F80' if is_bf16 else '0x4C004C00'};")
    lines += [f"mov.f32 ${number}, 0f00000000;" for number in range(4)]
    for step in range(first, first + count):
        high, j = step // 4, step % 4
        if odd_only and j % 2 == 0:
            continue
        a = ", ".join(["odd" if j % 2 else "one"] * 4)
        lines.append(mma(kind, ["$0", "$1", "$2", "$3"], a, f"${4 + 4 * j + high}, ${4 + 4 * j + 2 + high}"))
    # They are the same for all outputs, which the compiler is to know.
    return "\n".join([*lines, "mov.f32 $2, $0;", "mov.f32 $3, $1;", "}"])


@gluon.constexpr_function
def _int4_asm(first, count, is_bf16):  # type: ignore[no-untyped-def]
    """Assembly of `count` matrix instructions of 16 columns each, from the first-th of a block on.

    Operands: 4 sums out; the same 4 in; words of outputs g (4) and g + 8 (4); 4 times 4 pairs of x; sums of x (4); what the
    products start from (4); scale and zero of g (2) and of g + 8 (2)."""
    kind = "bf16" if is_bf16 else "f16"
    magic = "0x43004300" if is_bf16 else "0x64006400"
    lines = ["{", ".reg .b32 a0, a1, a2, a3, t0, t1, t2, t3;", ".reg .f32 p0, p1, p2, p3, s0, s1, z0, z1;"]
    lines += [".reg .b16 lo, hi;"]
    sums = ["p0", "p1", "p2", "p3"]
    start = "$36, $37, $38, $39"
    for high in (0, 1):
        for j in range(4):
            step = 4 * high + j
            if not first <= step < first + count:
                continue
            for number, word in enumerate((8 + high, 12 + high, 10 + high, 14 + high)):
                shift = 4 * j if is_bf16 else 8 * (j // 2)
                mask = "0x000F000F" if is_bf16 or j % 2 == 0 else "0x00F000F0"
                source = f"${word}"
                if shift:
                    source = f"t{number}"
                    if is_bf16 or j == 2 or step == first:
                        lines.append(f"shr.u32 t{number}, ${word}, {shift};")
                lines.append(f"lop3.b32 a{number}, {source}, {mask}, {magic}, 0xEA;")
            b = f"${16 + 4 * j + high}, ${16 + 4 * j + 2 + high}"
            lines.append(mma(kind, sums, "a0, a1, a2, a3", b, start))
            start = None
    for number, meta in enumerate(("$40", "$42")):
        lines.append(f"mov.b32 {{lo, hi}}, {meta};")
        lines.append(f"cvt.f32.f16 s{number}, lo;")
        lines.append(f"and.b32 z{number}, {meta}, 0xFFFF0000;" if is_bf16 else f"cvt.f32.f16 z{number}, hi;")
        lines.append(f"neg.f32 z{number}, z{number};")
    for number in range(4):
        lines.append(f"fma.rn.f32 p{number}, z{number // 2}, ${32 + number}, p{number};")
        lines.append(f"fma.rn.f32 ${number}, s{number // 2}, p{number}, ${4 + number};")
    return "\n".join([*lines, "}"])


OF_X = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 16))
OF_INT4 = gl.constexpr(",".join(["=&f"] * 4 + ["f"] * 4 + ["r"] * 24 + ["f"] * 8 + ["r"] * 4))


@gluon.jit
def _int4_tile(  # type: ignore[no-untyped-def]
    codes, scales, pair, is_there, old, t, index,
    BLOCKS: gl.constexpr, SUB: gl.constexpr, TILES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Words of the first eight outputs [KB · 128] and of the second, and SUB scales of each."""
    block = index // 128 * TILES + t
    codes += (pair // 4).to(gl.int64) * (BLOCKS * 1024) + pair % 4 * 256
    scales += (pair // 4).to(gl.int64) * (BLOCKS * SUB * 64) + pair % 4 * 16
    place = gl.max_contiguous(gl.multiple_of(block * 1024 + index % 128, 4), 4)
    tile = (load(codes + place, is_there, old[0], FIRST), load(codes + 128 + place, is_there, old[1], FIRST))
    for sub in gl.static_range(SUB):
        # Sums 0 and 1 of a thread belong to output g, 2 and 3 to g + 8.
        at = (block * SUB + sub) * 64 + index % 128 // 16 + index % 4 // 2 * 8
        tile = tile + (load(scales + at, is_there, old[2 + sub], FIRST),)
    return tile


@gluon.jit
def _int4_x(  # type: ignore[no-untyped-def]
    x, t, index, x_stride, num_rows, TILES: gl.constexpr, FRAGMENTS: gl.constexpr, SUB: gl.constexpr, IS_BF16: gl.constexpr
):  # fmt: skip
    """Of a block: four tensors [KB · 128] of neighbouring columns of x, two in a word (nibble j of W's word belongs to the j-th; odd ones
    are divided by 16); SUB sums of x and SUB starts of products."""
    row = gl.minimum(index % 128 // 16, num_rows - 1)
    block = index // 128 * TILES + t
    loaded = ()
    if FRAGMENTS:
        # A thread's 16 pairs of a block lie side by side.
        place = row * x_stride + block * 64 + index // 4 % 4 * 16 + index % 4
        place = gl.max_contiguous(gl.multiple_of(place, 4), 4)
        for j in gl.static_range(4):
            loaded = loaded + (gl.load(x + place + 4 * j),)
    else:
        v = index % 4
        place = row * x_stride + (block * 128 + v % 2 * 64 + v // 2 * 8 + index // 4 % 4 * 2) // 2
        for j in gl.static_range(4):
            loaded = loaded + (gl.load(x + place + 8 * j),)
    pairs = ()
    for j in gl.static_range(4):
        if IS_BF16 or j % 2 == 0:
            pairs = pairs + (loaded[j],)
        else:
            pairs = pairs + (
                gl.inline_asm_elementwise(
                    "{ .reg .b32 f; mov.b32 f, 0x2C002C00; mul.f16x2 $0, $1, f; }", "=r,r", [loaded[j]], dtype=gl.int32, is_pure=True, pack=1
                ),
            )  # fmt: skip
    result = pairs
    for sub in gl.static_range(SUB):
        result = result + (
            gl.inline_asm_elementwise(
                _sums_of_x_asm(8 // SUB * sub, 8 // SUB, IS_BF16, False), OF_X, [pairs[0], pairs[1], pairs[2], pairs[3]],
                dtype=gl.float32, is_pure=True, pack=4,
            ),
        )  # fmt: skip
    for sub in gl.static_range(SUB):
        if IS_BF16:
            result = result + (gl.full([index.shape[0]], 0.0, gl.float32, index.type.layout),)
        else:
            result = result + (
                gl.inline_asm_elementwise(
                    _sums_of_x_asm(8 // SUB * sub, 8 // SUB, False, True), OF_X, [pairs[0], pairs[1], pairs[2], pairs[3]],
                    dtype=gl.float32, is_pure=True, pack=4,
                ),
            )  # fmt: skip
    return result


@gluon.jit(do_not_specialize=["num_rows", "units"])
def _int4_stream(  # type: ignore[no-untyped-def]
    x,  # [M, K / 2] int32: pairs of 16-bit floats, rows x_stride apart
    codes,  # [N / 64, BLOCKS, 1024] int32
    scales,  # [N / 64, BLOCKS, SUB, 64] int32
    out,  # [M, n]; the same tensor as residual, if there is one
    residual,  # [M, n] or None
    bias,  # [n], or [2 n] with a gate; or None
    num_rows,
    n,
    x_stride,
    units,  # groups of PAIRS
    BLOCKS: gl.constexpr,
    SUB: gl.constexpr,
    KB: gl.constexpr,  # warps
    PAIRS: gl.constexpr,
    DEPTH: gl.constexpr,
    AHEAD: gl.constexpr,
    EARLY: gl.constexpr,  # what is multiplied with the sums and added to them is loaded before them
    HELD: gl.constexpr,  # x stays in registers
    FRAGMENTS: gl.constexpr,  # the columns of x are in the order in which threads need them
    INTERLEAVED: gl.constexpr,  # outputs of gate and up alternate, in eights
    GATED: gl.constexpr,  # an activation's name, or ""
    PDL: gl.constexpr,
):
    IS_BF16: gl.constexpr = out.dtype.element_ty == gl.bfloat16
    TILES: gl.constexpr = BLOCKS // KB
    W: gl.constexpr = 2 + SUB  # tensors of a tile of W
    X: gl.constexpr = 4 + 2 * SUB  # of x
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [KB], [0])
    index = gl.arange(0, KB * 128, layout)
    buffer = gl.allocate_shared_memory(gl.float32, [2 * KB, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    tiles = ()
    for at in gl.static_range(AHEAD):
        unit = gl.minimum(gl.program_id(0) + at // TILES * gl.num_programs(0), units - 1)
        for p in gl.static_range(PAIRS):
            tiles = tiles + _int4_tile(
                codes, scales, unit * PAIRS + p, True, (0, 0, 0, 0, 0, 0), at % TILES, index, BLOCKS, SUB, TILES, True
            )
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    held = ()
    if HELD:
        for t in gl.static_range(TILES):
            held = held + _int4_x(x, t, index, x_stride, num_rows, TILES, FRAGMENTS, SUB, IS_BF16)
    # Without a loop, the compiler keeps no addresses of x for all tiles.
    stop = units if HELD else gl.program_id(0) + 1
    for first in range(gl.program_id(0), stop, gl.num_programs(0) * DEPTH if HELD else 1):
        queue = tiles
        for d in gl.static_range(DEPTH):
            now = first + d * gl.num_programs(0)
            rows = gl.where(now < units, num_rows, 0)
            asked = ()
            if EARLY:
                for p in gl.static_range(PAIRS):
                    pair = gl.minimum(now, units - 1) * PAIRS + p
                    asked = asked + (ask(pair, residual, None, rows, n, KB, INTERLEAVED, GATED),)
            sums = ()
            for _ in gl.static_range(PAIRS):
                sums = sums + (gl.full([KB * 128], 0.0, gl.float32, layout),)
            for t in gl.static_range(TILES):
                if HELD:
                    of_x = held[t * X : (t + 1) * X]
                else:
                    of_x = _int4_x(x, t, index, x_stride, num_rows, TILES, FRAGMENTS, SUB, IS_BF16)
                new_sums = ()
                for p in gl.static_range(PAIRS):
                    tile = queue[p * W : (p + 1) * W]
                    total = sums[p]
                    for sub in gl.static_range(SUB):
                        total = gl.inline_asm_elementwise(
                            _int4_asm(8 // SUB * sub, 8 // SUB, IS_BF16), OF_INT4,
                            [
                                total, tile[0], tile[1], of_x[0], of_x[1], of_x[2], of_x[3], of_x[4 + sub],
                                of_x[4 + SUB + sub], tile[2 + sub],
                            ],
                            dtype=gl.float32, is_pure=True, pack=4,
                        )  # fmt: skip
                    new_sums = new_sums + (total,)
                sums = new_sums
                if HELD or t + AHEAD < TILES:
                    following = first + (d * TILES + t + AHEAD) // TILES * gl.num_programs(0)
                    is_there = gl.full([KB * 128], 0, gl.int32, layout) + following < units
                    fresh = ()
                    for p in gl.static_range(PAIRS):
                        fresh = fresh + _int4_tile(
                            codes, scales, following * PAIRS + p, is_there, queue[p * W : (p + 1) * W], (t + AHEAD) % TILES,
                            index, BLOCKS, SUB, TILES, not HELD,
                        )  # fmt: skip
                    queue = queue[PAIRS * W :] + fresh
                else:
                    queue = queue[PAIRS * W :]
            for p in gl.static_range(PAIRS):
                pair = gl.minimum(now, units - 1) * PAIRS + p
                addends = asked[p] if EARLY else ask(pair, residual, None, rows, n, KB, INTERLEAVED, GATED)
                end(
                    sums[p], addends, buffer, pair, out, bias, rows, n, False, residual is not None, KB, INTERLEAVED, GATED
                )  # fmt: skip
        if HELD:
            tiles = queue


_launch = Launcher(_int4_stream)


def int4_fits(weight: Int4Tensor, choice: StreamChoice) -> bool:
    """Whether every warp has the same number of blocks."""
    return weight.num_columns % (128 * choice.num_warps) == 0 and weight.num_outputs % (16 * choice.pairs) == 0


def int4_stream(
    x: torch.Tensor,
    weight: Int4Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    gated: str,
    choice: StreamChoice,
    processors: int,
    pdl: bool,
    in_fragments: bool = False,
) -> None:
    """x [M, K] · weight [N, K]ᵀ into out [M, N or N/2]; see `int4.int4_linear`. in_fragments: x is as rms_norm() leaves it."""
    num_rows = x.shape[0]
    assert num_rows <= MAX_ROWS and x.stride(1) == 1 and x.stride(0) % 8 == 0 and int4_fits(weight, choice)
    blocks = weight.codes.shape[1]
    units = weight.num_outputs // 16 // choice.pairs
    is_held = blocks // choice.num_warps <= HELD_TILES
    _launch(
        (min(units, processors * choice.per_processor) if is_held else units, 1, 1),
        (
            x.view(torch.int32), weight.codes, weight.scales, out, residual, bias, num_rows, out.shape[1], x.stride(0) // 2, units,
        ),
        (
            blocks, weight.subgroups, choice.num_warps, choice.pairs, choice.depth, choice.ahead, choice.is_early,
            is_held, in_fragments, weight.is_interleaved, gated, pdl,
        ),
        options(choice, pdl),
    )  # fmt: skip
