"""The experts of a few tokens in MXFP4 (`mxfp4_layout`): gate and up in one launch; down, weighted and added up, in another.

A unit is sixteen outputs. Warps load tiles of a unit and 128 columns straight into the registers in which the matrix instruction takes
them. Of gate and up a warp has whole units. Of down each warp has one of the token's experts, or a share of its columns, and its weights
are asked for before gate and up are done: which they are is known by then.

Instructions bound a warp, so few of them decode: codes become bfloat16 that are 2 ** 126 times too small, x comes 2 ** 64 times too large,
and the scale of 32 columns multiplies their sums."""

# Gluon supports tuple + tuple but not (*tuple, more), and allows a variable's tuple to grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc,var-annotated"

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.gemm.stream_parts import mma
from octavo.kernels.triton.moe.few_parts import expert_of, experts_of
from octavo.kernels.triton.moe.few_route import Routed
from octavo.kernels.triton.moe.mxfp4_layout import COLUMNS, LOWERED, ROTATIONS, Mxfp4Tensor
from octavo.kernels.triton.runtime.chip import starts_early
from octavo.kernels.triton.runtime.launch import Launcher

X_SCALE = 2.0**64
SCALE_OF_X = gl.constexpr(X_SCALE)
LOWER = gl.constexpr(2.0**LOWERED / X_SCALE)  # sums are so much too large


class PackedFewTiles(NamedTuple):
    """How the two products are cut. Changes only speed, and the order of sums."""

    gate_warps: int  # of a program: each has a unit
    gate_ahead: int  # tiles
    gate_registers: int
    down_share: int  # warps that share an expert
    down_ahead: int  # tiles
    down_registers: int


def _asm() -> str:
    """A tile of 16 outputs and 128 columns: eight matrix instructions.

    Operands: 4 sums out, of which the first and the third are used; the same 4 in; words of outputs g (4) and g + 8 (4); 4 times 4 pairs of
    x; exponents of g (2) and of g + 8 (2)."""
    lines = ["{", ".reg .b32 a0, a1, a2, a3, t, u, v;", ".reg .f32 z, p0, p1, p2, p3;", "mov.f32 z, 0f00000000;"]
    for group in range(4):
        high = group // 2
        start = "z, z, z, z"
        for j in (group % 2 * 2, group % 2 * 2 + 1):
            for number, word in enumerate((8 + high, 12 + high, 10 + high, 14 + high)):
                source = f"${word}"
                mask, left = ROTATIONS[j][-1]
                if left:
                    lines.append(f"shf.r.wrap.b32 a{number}, {source}, {source}, {left};")
                    source = f"a{number}"
                lines.append(f"and.b32 a{number}, {source}, 0x{mask:08X};")
                for other_mask, other in ROTATIONS[j][:-1]:
                    lines.append(f"shf.r.wrap.b32 t, ${word}, ${word}, {other};")
                    lines.append(f"lop3.b32 a{number}, t, 0x{other_mask:08X}, a{number}, 0xEA;")
            b = f"${16 + 4 * j + high}, ${16 + 4 * j + 2 + high}"
            lines.append(mma("bf16", ["p0", "p1", "p2", "p3"], "a0, a1, a2, a3", b, start))
            start = None
        # A byte becomes the exponent of a float.
        for power, meta in (("u", "$32"), ("v", "$34")):
            shift = f"shl.b32 {power}, {meta}, {23 - 8 * group};" if group < 3 else f"shr.u32 {power}, {meta}, 1;"
            lines += [shift, f"and.b32 {power}, {power}, 0x7F800000;"]
        lines.append(f"fma.rn.f32 $0, p0, u, {'$4' if group == 0 else '$0'};")
        lines.append(f"fma.rn.f32 $2, p2, v, {'$6' if group == 0 else '$2'};")
    return "\n".join([*lines, "mov.f32 $1, $5;", "mov.f32 $3, $7;", "}"])


ASM = gl.constexpr(_asm())
OPERANDS = gl.constexpr(",".join(["=&f"] * 4 + ["f"] * 4 + ["r"] * 28))


@gluon.constexpr_function
def _warps_layout(W):  # type: ignore[no-untyped-def]
    """[W, 128]: of each lane four neighbours."""
    return gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])


@gluon.jit
def _of_units(words, exponents, blocks, unit, DEPTH: gl.constexpr, W: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where the words and the exponents of the warps' units begin. Of each warp [W]: the first of its expert's blocks of 64 outputs, and
    its unit there."""
    layout: gl.constexpr = _warps_layout(W)
    lanes: gl.constexpr = _lanes_layout(W)
    block = (blocks + unit // 4).to(gl.int64) * DEPTH
    index = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, layout)), 0)
    start = gl.multiple_of(block * 1024 + unit % 4 * 256, 128)
    at = gl.expand_dims(gl.convert_layout(block * 64 + unit % 4 * 16, gl.SliceLayout(1, lanes)), 1)
    lane = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, lanes)), 0)
    return words + (gl.expand_dims(start, 1) + index), exponents + (at + lane // 4)


@gluon.constexpr_function
def _lanes_layout(W):  # type: ignore[no-untyped-def]
    """[W, 32]"""
    return gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])


@gluon.jit
def _tile(units, block, DEPTH: gl.constexpr, W: gl.constexpr):  # type: ignore[no-untyped-def]
    """Words of the first eight outputs [W, 128] and of the second, and their exponents. block [W]: along K."""
    block = gl.minimum(block, DEPTH - 1)
    place = units[0] + gl.expand_dims(gl.multiple_of(block * 1024, 128), 1)
    # Of exponents each is there twice: sums 0 and 1 of a lane belong to output g, 2 and 3 to g + 8.
    at = units[1] + gl.expand_dims(gl.convert_layout(block * 64, gl.SliceLayout(1, _lanes_layout(W))), 1)
    first = gl.load(at)
    second = gl.load(at + 8)
    both = gl.join(gl.join(first, first), gl.join(second, second))  # [W, 32, 2 times the same, half]
    both = gl.reshape(gl.permute(both, [0, 1, 3, 2]), [W, 128])
    return gl.load(place), gl.load(place + 128), gl.convert_layout(both, _warps_layout(W))


@gluon.jit
def _pairs(x, row, block, W: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of a block: four tensors [W, 128] of neighbouring columns of x, two in a word. x is in fragments: a thread's sixteen words of a block
    lie side by side. row and block [W]: where they begin."""
    layout: gl.constexpr = _warps_layout(W)
    index = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, layout)), 0)
    place = gl.expand_dims(row + block * 64, 1) + (index // 4 % 4 * 16 + index % 4)
    place = gl.max_contiguous(gl.multiple_of(place, [4, 4]), [1, 4])
    pairs = ()
    for j in gl.static_range(4):
        pairs = pairs + (gl.load(x + (place + 4 * j)),)
    return pairs


@gluon.jit
def _sums(sums, tile, x):  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise(
        ASM, OPERANDS, [sums, tile[0], tile[1], x[0], x[1], x[2], x[3], tile[2]],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _sums_of(  # type: ignore[no-untyped-def]
    tiles, units, x, row, first,
    DEPTH: gl.constexpr, TILES: gl.constexpr, AHEAD: gl.constexpr, ZEROS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """[W, 128] sums over the warps' TILES blocks from the first on; the first AHEAD tiles are loaded. ZEROS: a block of x for those beyond."""
    layout: gl.constexpr = _warps_layout(W)
    ROUNDS: gl.constexpr = (TILES + AHEAD - 1) // AHEAD
    sums = gl.zeros([W, 128], gl.float32, layout)
    for turn in range(ROUNDS):
        fresh = ()
        for t in gl.static_range(AHEAD):
            number = turn * AHEAD + t
            block = first + number
            if ROUNDS * AHEAD > TILES:
                block = gl.where(number < TILES, block, ZEROS)
            sums = _sums(sums, tiles[3 * t : 3 * t + 3], _pairs(x, row, block, W))
            # The last round loads some tiles again, which are in the cache.
            fresh = fresh + _tile(units, first + gl.minimum(number + AHEAD, TILES - 1), DEPTH, W)
        tiles = fresh
    return sums


@gluon.jit
def _gate_up(  # type: ignore[no-untyped-def]
    x,  # [T, WIDTH / 2] int32: pairs of bfloat16, in fragments
    keys,  # [T, E]
    words,
    exponents,
    bias,  # [experts, 2 · n] or None
    out,  # [T · K, OUT_WIDTH], in fragments
    alpha,
    limit,
    offset,
    n,  # outputs: a multiple of 32
    E: gl.constexpr,
    K: gl.constexpr,
    DEPTH: gl.constexpr,  # blocks of K
    WIDTH: gl.constexpr,
    OUT_WIDTH: gl.constexpr,
    AHEAD: gl.constexpr,
    IS_CLAMPED: gl.constexpr,
    W: gl.constexpr,
    PDL: gl.constexpr,
):
    """A unit for each warp, of one pair of a token and an expert."""
    layout: gl.constexpr = _warps_layout(W)
    ACROSS: gl.constexpr = (OUT_WIDTH // 8 + W - 1) // W
    pair = gl.program_id(0) // ACROSS
    token = pair // K
    unit = gl.program_id(0) % ACROSS * W + gl.arange(0, W, gl.SliceLayout(1, layout))
    its_unit = gl.minimum(unit, n // 8 - 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # what starts after this may then read the keys at once
    if gl.program_id(0) % ACROSS * W >= n // 8:
        # What is read beyond the last output is zeros.
        column = gl.expand_dims(unit * 8, 1) + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, layout)), 0)
        zeros = (column * 0).to(out.dtype.element_ty)
        gl.store(out + (pair * OUT_WIDTH + _fragment(column)), zeros, mask=column < OUT_WIDTH)
        return
    expert = expert_of(keys + token * E, pair % K, E, W)
    none = unit * 0
    units = _of_units(words, exponents, none + expert * (n // 32), its_unit, DEPTH, W)
    tiles = ()
    for t in gl.static_range(AHEAD):
        tiles = tiles + _tile(units, none + t, DEPTH, W)
    sums = _sums_of(tiles, units, x, none + token * (WIDTH // 2), none, DEPTH, DEPTH, AHEAD, WIDTH // 128 - 1, W)
    first, _ = gl.split(gl.reshape(sums, [W, 32, 2, 2]))
    gate, up = gl.split(first)
    gate = gate * LOWER
    up = up * LOWER
    lane = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, gate.type.layout)), 0)
    output = gl.expand_dims(gl.convert_layout(unit, gl.SliceLayout(1, gate.type.layout)), 1) * 8 + lane // 4
    is_output = output < n
    if bias is not None:
        at = bias + (expert * (2 * n) + output)
        gate += gl.load(at, mask=is_output, other=0.0).to(gl.float32)
        up += gl.load(at + n, mask=is_output, other=0.0).to(gl.float32)
    if IS_CLAMPED:  # by comparisons, so that NaN stays NaN
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    inner = gate / (1.0 + gl.exp(-alpha * gate)) * (up + offset) * SCALE_OF_X
    inner = gl.where(is_output, inner, 0.0)  # what is read beyond the last output is zeros
    gl.store(
        out + (pair * OUT_WIDTH + _fragment(output)),
        inner.to(out.dtype.element_ty),
        mask=(lane % 4 == 0) & (output < OUT_WIDTH),
    )


@gluon.constexpr_function
def _end_layout(W):  # type: ignore[no-untyped-def]
    """[q and row 8, g 8, half 2]"""
    return gl.BlockedLayout([1, 1, 2], [4, 8, 1], [W, 1, 1], [2, 1, 0])


@gluon.jit
def _ends(sums, W: gl.constexpr):  # type: ignore[no-untyped-def]
    """The sums over all warps of a unit's first eight outputs, and of its second. sums [W, (g 8, q 4, half 2, row 2)]: all rows are the
    same."""
    total = gl.sum(sums, 0)
    parts = gl.permute(gl.reshape(total, [8, 4, 2, 2]), [1, 3, 0, 2])  # [q, row, g, half]
    parts = gl.convert_layout(gl.reshape(parts, [8, 8, 2]), _end_layout(W))
    index = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, _end_layout(W)))), 1), 2)
    return gl.split(gl.sum(gl.where(index == 0, parts, 0.0), 0))


@gluon.jit
def _fragment(column):  # type: ignore[no-untyped-def]
    """Of every 128 columns, 64 a + 16 b + 8 c + 2 d + e goes to 32 d + 8 b + 4 c + 2 a + e."""
    place = column // 128 * 128 + column // 2 % 4 * 32 + column // 16 % 4 * 8
    return place + (column // 8 % 2 * 4 + column // 64 % 2 * 2 + column % 2)


@gluon.jit
def _down(  # type: ignore[no-untyped-def]
    inner,  # [T · K, WIDTH / 2] int32: pairs of bfloat16, in fragments
    keys,  # [T, E]
    words,
    exponents,
    bias,  # [experts, n] or None
    out,  # [T, n]: added to
    n,
    num_experts,
    height,  # blocks of 64 outputs of an expert
    E: gl.constexpr,
    K: gl.constexpr,
    NORMALISED: gl.constexpr,
    DEPTH: gl.constexpr,
    WIDTH: gl.constexpr,
    SHARE: gl.constexpr,
    AHEAD: gl.constexpr,
    W: gl.constexpr,
    PDL: gl.constexpr,
):
    """One unit of one token: the weighted sum of its experts', which lie side by side on the warps."""
    TILES: gl.constexpr = (DEPTH + SHARE - 1) // SHARE
    layout: gl.constexpr = _warps_layout(W)
    across = (n + 15) // 16
    token = gl.program_id(0) // across
    unit = gl.program_id(0) % across
    warp = gl.arange(0, W, gl.SliceLayout(1, layout))
    expert, share = experts_of(keys + token * E, num_experts, gl.SliceLayout(1, layout), K, NORMALISED, SHARE, E, W)
    first = warp % SHARE * TILES
    units = _of_units(words, exponents, expert * height, warp * 0 + unit, DEPTH, W)
    tiles = ()
    for t in gl.static_range(AHEAD):
        tiles = tiles + _tile(units, first + t, DEPTH, W)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = (token * K + warp // SHARE) * (WIDTH // 2)
    sums = _sums_of(tiles, units, inner, row, first, DEPTH, TILES, AHEAD, WIDTH // 128 - 1, W)
    index = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, layout)), 0)
    sums = sums * LOWER
    if bias is not None:
        output = unit * 16 + (index // 16 + index % 4 // 2 * 8)
        at = gl.expand_dims(expert * n, 1) + output
        mask = (output < n) & (gl.expand_dims(warp % SHARE, 1) == 0)
        sums += gl.load(bias + at, mask=mask, other=0.0).to(gl.float32)
    first_eight, second = _ends(sums * gl.expand_dims(share, 1), W)
    output = unit * 16 + gl.arange(0, 8, first_eight.type.layout)
    place = out + (token * n + output)
    first_eight += gl.load(place, mask=output < n, other=0.0).to(gl.float32)
    second += gl.load(place + 8, mask=output + 8 < n, other=0.0).to(gl.float32)
    gl.store(place, first_eight.to(out.dtype.element_ty), mask=output < n)
    gl.store(place + 8, second.to(out.dtype.element_ty), mask=output + 8 < n)


_launch_gate_up, _launch_down = Launcher(_gate_up), Launcher(_down)


def width_for(num_columns: int, warps: int) -> int:
    """Columns of x that so many warps side by side read: those of whole tiles, as many for each, and a block of zeros."""
    of_each = -(-num_columns // (COLUMNS * warps))
    return (of_each * warps + 1) * COLUMNS


def mxfp4_few(
    routed: Routed,  # in fragments, with the width for one warp, X_SCALE times too large
    num_chosen: int,  # a power of two
    is_normalised: bool,
    gate_up: Mxfp4Tensor,  # [E, 2 I, D] interleaved
    down: Mxfp4Tensor,  # [E, D, I]
    biases: tuple[torch.Tensor | None, torch.Tensor | None],  # [E, 2 I]: gate, then up; [E, D]
    gate: tuple[float, float, float],  # alpha, limit (0: none) and offset
    residual: torch.Tensor,  # [T, D], changed and returned
    tiles: PackedFewTiles,
) -> torch.Tensor:
    """residual + the weighted sum of the outputs of each token's experts, [T, D]."""
    x, keys = routed
    num_tokens, depth = residual.shape
    num_experts, inner_size = len(gate_up.words), down.num_columns
    assert gate_up.is_interleaved and gate_up.num_outputs == 2 * inner_size and down.num_outputs == depth
    assert x.shape[1] == width_for(depth, 1) and x.is_contiguous() and residual.is_contiguous()
    assert keys.is_contiguous() and num_chosen & (num_chosen - 1) == 0
    pdl = starts_early(x.device)
    early = {"launch_pdl": True} if pdl else {}
    width = width_for(inner_size, tiles.down_share)
    inner = torch.empty((num_tokens * num_chosen, width), dtype=x.dtype, device=x.device)
    alpha, limit, offset = (float(number) for number in gate)
    _launch_gate_up(
        (-(-width // (8 * tiles.gate_warps)) * num_tokens * num_chosen, 1, 1),
        (
            x.view(torch.int32), keys, gate_up.words, gate_up.exponents, biases[0], inner, alpha, limit, offset, inner_size,
        ),
        (
            keys.shape[1], num_chosen, gate_up.words.shape[2], x.shape[1], width,
            min(tiles.gate_ahead, gate_up.words.shape[2]), limit != 0.0, tiles.gate_warps, pdl,
        ),
        {"num_warps": tiles.gate_warps, "maxnreg": tiles.gate_registers} | early,
    )  # fmt: skip
    warps = tiles.down_share * num_chosen
    _launch_down(
        (-(-depth // 16) * num_tokens, 1, 1),
        (
            inner.view(torch.int32), keys, down.words, down.exponents, biases[1], residual, depth, num_experts,
            down.words.shape[1],
        ),
        (
            keys.shape[1], num_chosen, is_normalised, down.words.shape[2], width, tiles.down_share,
            min(tiles.down_ahead, -(-down.words.shape[2] // tiles.down_share)), warps, pdl,
        ),
        {"num_warps": warps, "maxnreg": tiles.down_registers} | early,
    )  # fmt: skip
    return residual
