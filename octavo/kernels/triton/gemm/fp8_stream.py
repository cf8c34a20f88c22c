"""y = x · Wᵀ for 1 to 8 rows and weights in 8-bit floats, by programs that stay for many outputs. `skinny` chooses when to use it.

They work as those of `int4_stream`. 8-bit floats become pairs of float16 by one instruction; x is then float16, too. bfloat16 is divided
by 16 before: numbers of 1e-4 keep their bits, and numbers up to a million are not cut off. Few models have inputs of 65,504; some do."""

# Gluon supports tuple + tuple but not (*tuple, more), and allows a variable's tuple to grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc,var-annotated"

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.gemm.stream import FP8_COLUMNS, HELD_TILES, MAX_ROWS, StreamChoice, options
from octavo.kernels.triton.gemm.stream_parts import ask, end, load, mma
from octavo.kernels.triton.runtime.launch import Launcher


@gluon.constexpr_function
def _fp8_asm():  # type: ignore[no-untyped-def]
    """Assembly of four matrix instructions of 16 columns each.

    Operands: 4 sums out; the same 4 in; words of outputs g (4) and g + 8 (4); pairs of x (4 of the first words, 4 more)."""
    lines = ["{", ".reg .b32 a0, a1, a2, a3;", ".reg .b16 lo, hi;"]
    sums, start = ["$0", "$1", "$2", "$3"], "$4, $5, $6, $7"
    for step in range(4):
        for row, word in enumerate((8 + step, 12 + step)):
            lines.append(f"mov.b32 {{lo, hi}}, ${word};")
            lines.append(f"cvt.rn.f16x2.e4m3x2 a{row}, lo;")
            lines.append(f"cvt.rn.f16x2.e4m3x2 a{row + 2}, hi;")
        at = 16 + 2 * step
        lines.append(mma("f16", sums, "a0, a1, a2, a3", f"${at}, ${at + 1}", start))
        start = None
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _to_f16_asm():  # type: ignore[no-untyped-def]
    """A sixteenth of a pair of bfloat16 as a pair of float16, up to its largest number."""
    return """{
    .reg .f32 a, b;
    .reg .b32 pair, sixteenth, most, least;
    mov.b32 sixteenth, 0x3D803D80;
    mul.rn.bf16x2 pair, $1, sixteenth;
    shl.b32 a, pair, 16;
    and.b32 b, pair, 0xFFFF0000;
    cvt.rn.f16x2.f32 $0, b, a;
    mov.b32 most, 0x7BFF7BFF;
    mov.b32 least, 0xFBFFFBFF;
    min.NaN.f16x2 $0, $0, most;
    max.NaN.f16x2 $0, $0, least;
    }"""


OF_FP8 = gl.constexpr(",".join(["=&f"] * 4 + ["f"] * 4 + ["r"] * 16))


@gluon.jit
def _fp8_tile(  # type: ignore[no-untyped-def]
    weight, pair, distance, is_there, old, t, index,
    K: gl.constexpr, TILES: gl.constexpr, INTERLEAVED: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Words of the first eight outputs [KB · 128] and of the second: 16 neighbouring columns of an output in a thread."""
    row = index % 128 // 16
    column = (index // 128 * TILES + t) * 16 + index // 4 % 4 * 4 + index % 4
    place = gl.max_contiguous(gl.multiple_of(row * (K // 4) + column, 4), 4)
    weight += pair.to(gl.int64) * ((8 if INTERLEAVED else 16) * (K // 4))
    other = weight + distance.to(gl.int64) * (K // 4)
    return load(weight + place, is_there, old[0], FIRST), load(other + place, is_there, old[1], FIRST)


@gluon.jit
def _fp8_x(x, t, index, x_stride, num_rows, TILES: gl.constexpr, IS_BF16: gl.constexpr):  # type: ignore[no-untyped-def]
    """The same 16 columns of a row of x, as float16, two in a word: two tensors [KB · 128]. Of bfloat16, a sixteenth."""
    row = gl.minimum(index % 128 // 16, num_rows - 1)
    place = row * x_stride + (index // 128 * TILES + t) * 32 + index // 4 % 4 * 8 + index % 4
    place = gl.max_contiguous(gl.multiple_of(place, 4), 4)
    words = ()
    for part in gl.static_range(2):
        loaded = gl.load(x + place + 4 * part)
        if IS_BF16:
            loaded = gl.inline_asm_elementwise(_to_f16_asm(), "=r,r", [loaded], dtype=gl.int32, is_pure=True, pack=1)
        words = words + (loaded,)
    return words


@gluon.jit(do_not_specialize=["num_rows", "units"])
def _fp8_stream(  # type: ignore[no-untyped-def]
    x,  # [M, K / 2] int32: pairs of 16-bit floats, rows x_stride apart
    weight,  # [N, K / 4] int32: four e4m3 in a word
    scales,  # [N] float32
    out,  # [M, n]; the same tensor as residual, if there is one
    residual,  # [M, n] or None
    bias,  # [N] or None
    num_rows,
    n,
    x_stride,
    units,
    K: gl.constexpr,
    KB: gl.constexpr,
    PAIRS: gl.constexpr,
    DEPTH: gl.constexpr,
    AHEAD: gl.constexpr,
    EARLY: gl.constexpr,  # what is multiplied with the sums and added to them is loaded before them
    HELD: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    IS_BF16: gl.constexpr = out.dtype.element_ty == gl.bfloat16
    TILES: gl.constexpr = K // (64 * KB)
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [KB], [0])
    INTERLEAVED: gl.constexpr = GATED != ""
    index = gl.arange(0, KB * 128, layout)
    buffer = gl.allocate_shared_memory(gl.float32, [2 * KB, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    distance = n if INTERLEAVED else n * 0 + 8
    tiles = ()
    for at in gl.static_range(AHEAD):
        unit = gl.minimum(gl.program_id(0) + at // TILES * gl.num_programs(0), units - 1)
        for p in gl.static_range(PAIRS):
            tiles = tiles + _fp8_tile(
                weight, unit * PAIRS + p, distance, True, (0, 0), at % TILES, index, K, TILES, INTERLEAVED, True
            )
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    held = ()
    if HELD:
        for t in gl.static_range(TILES):
            held = held + _fp8_x(x, t, index, x_stride, num_rows, TILES, IS_BF16)
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
                    asked = asked + (ask(pair, residual, scales, rows, n, KB, INTERLEAVED, GATED),)
            # Two chains of matrix instructions for each, which wait less for each other.
            sums = ()
            for _ in gl.static_range(2 * PAIRS):
                sums = sums + (gl.full([KB * 128], 0.0, gl.float32, layout),)
            for t in gl.static_range(TILES):
                if HELD:
                    of_x = held[t * 2 : t * 2 + 2]
                else:
                    of_x = _fp8_x(x, t, index, x_stride, num_rows, TILES, IS_BF16)
                following = first + (d * TILES + t + AHEAD) // TILES * gl.num_programs(0)
                is_there = gl.full([KB * 128], 0, gl.int32, layout) + following < units
                new_sums = ()
                fresh = ()
                for p in gl.static_range(PAIRS):
                    tile = queue[2 * p : 2 * p + 2]
                    total = gl.inline_asm_elementwise(
                        _fp8_asm(), OF_FP8, [sums[p], tile[0], tile[1], of_x[0], of_x[1]],
                        dtype=gl.float32, is_pure=True, pack=4,
                    )  # fmt: skip
                    new_sums = new_sums + (total,)
                    if HELD or t + AHEAD < TILES:
                        fresh = fresh + _fp8_tile(
                            weight, following * PAIRS + p, distance, is_there, tile, (t + AHEAD) % TILES, index, K, TILES,
                            INTERLEAVED, not HELD,
                        )  # fmt: skip
                sums = sums[PAIRS:] + new_sums
                queue = queue[2 * PAIRS :] + fresh
            for p in gl.static_range(PAIRS):
                pair = gl.minimum(now, units - 1) * PAIRS + p
                addends = asked[p] if EARLY else ask(pair, residual, scales, rows, n, KB, INTERLEAVED, GATED)
                total = sums[p] + sums[PAIRS + p]
                if IS_BF16:
                    total *= 16.0
                end(
                    total, addends, buffer, pair, out, bias, rows, n, True, residual is not None, KB, INTERLEAVED, GATED
                )  # fmt: skip
        if HELD:
            tiles = queue


_launch = Launcher(_fp8_stream)


def fp8_fits(n: int, k: int, choice: StreamChoice) -> bool:
    return k % (FP8_COLUMNS * choice.num_warps) == 0 and n % (16 * choice.pairs) == 0


def fp8_stream(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    gated: str,
    choice: StreamChoice,
    processors: int,
    pdl: bool,
) -> None:
    """x [M, K] · weight [N, K]ᵀ into out [M, N or N/2]; see `skinny.few_rows_linear`."""
    num_rows, k = x.shape
    assert num_rows <= MAX_ROWS and x.stride(1) == 1 and x.stride(0) % 8 == 0
    assert fp8_fits(weight.shape[0], k, choice)
    units = weight.shape[0] // 16 // choice.pairs
    is_held = k // FP8_COLUMNS // choice.num_warps <= 2 * HELD_TILES
    _launch(
        (min(units, processors * choice.per_processor) if is_held else units, 1, 1),
        (
            x.view(torch.int32), weight.view(torch.int32), scales, out, residual, bias, num_rows, out.shape[1], x.stride(0) // 2, units,
        ),
        (k, choice.num_warps, choice.pairs, choice.depth, choice.ahead, choice.is_early, is_held, gated, pdl),
        options(choice, pdl),
    )  # fmt: skip
