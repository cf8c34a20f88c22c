"""The experts of a few tokens in bfloat16, by multiply-adds in float32: gate and up in one launch; down, weighted and added up, in
another.

The time is that of reading the weights. A warp has whole rows of W and loads far ahead, 16 bytes a thread. Of down each warp has one of
the token's experts, and its weights are asked for before gate and up are done: which they are is known by then."""

# Gluon supports tuple + tuple but not (*tuple, more), and allows a variable's tuple to grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc,var-annotated"

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.moe.few_parts import expert_of, experts_of
from octavo.kernels.triton.moe.few_route import Routed
from octavo.kernels.triton.runtime.chip import starts_early
from octavo.kernels.triton.runtime.launch import Launcher

CHUNK = gl.constexpr(256)  # neighbours of a row of W that a warp loads at once


class FewTiles(NamedTuple):
    """How the two products are cut. Changes only speed, and the order of sums."""

    gate_warps: int
    gate_steps: int  # rows of gate, and as many of up, of a warp
    gate_ahead: int  # chunks of both that are loaded before the first is used
    down_rows: int  # of a program; a power of two
    down_share: int  # warps that share an expert
    down_ahead: int  # chunks
    gate_registers: int = 128
    down_registers: int = 128


@gluon.constexpr_function
def _rows_layout(W):  # type: ignore[no-untyped-def]
    """[W, CHUNK]: a row for each warp."""
    return gl.BlockedLayout([1, 8], [1, 32], [W, 1], [1, 0])


@gluon.jit
def _load(place, column, end: gl.constexpr, WHOLE: gl.constexpr):  # type: ignore[no-untyped-def]
    if WHOLE:
        return gl.load(place)
    else:
        return gl.load(place, mask=column < end, other=0.0)


@gluon.jit
def _gate_and_up(  # type: ignore[no-untyped-def]
    weight, row, number, D: gl.constexpr, INNER: gl.constexpr, CHUNKS: gl.constexpr, W: gl.constexpr
):
    """Chunk `number` of the warps' rows: [W, CHUNK] each. Rows beyond the last repeat it: they are not stored."""
    layout: gl.constexpr = _rows_layout(W)
    column = gl.expand_dims(number % CHUNKS * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout)), 0)
    place = weight + (gl.expand_dims(gl.minimum(row + number // CHUNKS * W, INNER - 1) * D, 1) + column)
    WHOLE: gl.constexpr = D % CHUNK == 0
    return _load(place, column, D, WHOLE), _load(place + INNER * D, column, D, WHOLE)


@gluon.jit
def _gate_up(  # type: ignore[no-untyped-def]
    x,  # [T, D]
    keys,  # [T, E]
    weight,  # [experts, 2 · INNER, D]: gate, then up
    bias,  # [experts, 2 · INNER] or None
    out,  # [T · K, INNER]
    alpha,
    limit,
    offset,
    E: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    INNER: gl.constexpr,
    IS_CLAMPED: gl.constexpr,
    W: gl.constexpr,
    STEPS: gl.constexpr,
    AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    """W · STEPS outputs of one pair of a token and an expert."""
    layout: gl.constexpr = _rows_layout(W)
    ACROSS: gl.constexpr = (INNER + W * STEPS - 1) // (W * STEPS)
    CHUNKS: gl.constexpr = (D + CHUNK - 1) // CHUNK
    pair = gl.program_id(0) // ACROSS
    token = pair // K
    row = gl.program_id(0) % ACROSS * (W * STEPS) + gl.arange(0, W, gl.SliceLayout(1, layout))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # what starts after this may then read the keys at once
    expert = expert_of(keys + token * E, pair % K, E, W)
    its_weight = weight + expert.to(gl.int64) * (2 * INNER * D)
    tiles = ()
    for number in gl.static_range(AHEAD):
        tiles = tiles + _gate_and_up(its_weight, row, number, D, INNER, CHUNKS, W)
    numbers = ()
    for chunk in gl.static_range(CHUNKS):
        column = chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
        numbers = numbers + (_load(x + (token * D + column), column, D, D % CHUNK == 0),)
    for step in gl.static_range(STEPS):
        gate = gl.zeros([W, CHUNK], gl.float32, layout)
        up = gl.zeros([W, CHUNK], gl.float32, layout)
        for chunk in gl.static_range(CHUNKS):
            part = gl.expand_dims(numbers[chunk].to(gl.float32), 0)
            gate += tiles[0].to(gl.float32) * part
            up += tiles[1].to(gl.float32) * part
            tiles = tiles[2:]
            if step * CHUNKS + chunk + AHEAD < STEPS * CHUNKS:
                tiles = tiles + _gate_and_up(its_weight, row, step * CHUNKS + chunk + AHEAD, D, INNER, CHUNKS, W)
        gate = gl.sum(gate, 1)
        up = gl.sum(up, 1)
        output = row + step * W
        is_output = output < INNER
        if bias is not None:
            at = bias + (expert * (2 * INNER) + output)
            gate += gl.load(at, mask=is_output, other=0.0).to(gl.float32)
            up += gl.load(at + INNER, mask=is_output, other=0.0).to(gl.float32)
        if IS_CLAMPED:  # by comparisons, so that NaN stays NaN
            gate = gl.where(gate > limit, limit, gate)
            up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        inner = gate / (1.0 + gl.exp(-alpha * gate)) * (up + offset)
        gl.store(out + (pair * INNER + output), inner.to(out.dtype.element_ty), mask=is_output)


@gluon.jit
def _down_tile(  # type: ignore[no-untyped-def]
    weight, expert, first, number,
    D: gl.constexpr, INNER: gl.constexpr, CHUNKS: gl.constexpr, SHARE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Chunk number % CHUNKS of each warp's share, of row number // CHUNKS: [W, CHUNK]."""
    row = gl.minimum(first + number // CHUNKS, D - 1)
    column = _down_column(number % CHUNKS, SHARE, W)
    place = weight + (gl.expand_dims(expert.to(gl.int64) * (D * INNER), 1) + (row * INNER + column))
    return _load(place, column, INNER, INNER % (CHUNK * SHARE) == 0)


@gluon.jit
def _down_column(chunk, SHARE: gl.constexpr, W: gl.constexpr):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = _rows_layout(W)
    share = gl.arange(0, W, gl.SliceLayout(1, layout)) % SHARE
    start = (chunk * SHARE + share) * CHUNK
    return gl.expand_dims(start, 1) + gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(0, layout)), 0)


@gluon.jit
def _joined(parts, COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    """COUNT tensors [W] → [W, 2, 2 …]: the first number is the first index's last."""
    if COUNT == 1:
        return parts[0]
    else:
        return gl.join(_joined(parts[: COUNT // 2], COUNT // 2), _joined(parts[COUNT // 2 :], COUNT // 2))


@gluon.jit
def _down(  # type: ignore[no-untyped-def]
    inner,  # [T · K, INNER]
    keys,  # [T, E]
    weight,  # [experts, D, INNER]
    bias,  # [experts, D] or None
    out,  # [T, D]: added to
    num_experts,
    E: gl.constexpr,
    K: gl.constexpr,
    NORMALISED: gl.constexpr,
    D: gl.constexpr,
    INNER: gl.constexpr,
    W: gl.constexpr,
    ROWS: gl.constexpr,
    SHARE: gl.constexpr,
    AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    """ROWS outputs of one token: the weighted sum of its experts', which lie side by side on the warps."""
    layout: gl.constexpr = _rows_layout(W)
    ACROSS: gl.constexpr = (D + ROWS - 1) // ROWS
    CHUNKS: gl.constexpr = (INNER + CHUNK * SHARE - 1) // (CHUNK * SHARE)
    token = gl.program_id(0) // ACROSS
    first = gl.program_id(0) % ACROSS * ROWS
    expert, share = experts_of(keys + token * E, num_experts, gl.SliceLayout(1, layout), K, NORMALISED, SHARE, E, W)
    tiles = ()
    for number in gl.static_range(AHEAD):
        tiles = tiles + (_down_tile(weight, expert, first, number, D, INNER, CHUNKS, SHARE, W),)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = gl.minimum(gl.arange(0, W, gl.SliceLayout(1, layout)) // SHARE, K - 1)
    rows = gl.expand_dims((token * K + slot) * INNER, 1)
    numbers = ()
    for chunk in gl.static_range(CHUNKS):
        column = _down_column(chunk, SHARE, W)
        numbers = numbers + (_load(inner + (rows + column), column, INNER, INNER % (CHUNK * SHARE) == 0),)
    has_bias = gl.arange(0, W, gl.SliceLayout(1, layout)) % SHARE == 0
    parts = ()
    for row in gl.static_range(ROWS):
        sums = gl.zeros([W, CHUNK], gl.float32, layout)
        for chunk in gl.static_range(CHUNKS):
            sums += tiles[0].to(gl.float32) * numbers[chunk].to(gl.float32)
            tiles = tiles[1:]
            if row * CHUNKS + chunk + AHEAD < ROWS * CHUNKS:
                tiles = tiles + (
                    _down_tile(weight, expert, first, row * CHUNKS + chunk + AHEAD, D, INNER, CHUNKS, SHARE, W),
                )
        total = gl.sum(sums, 1)
        if bias is not None:
            place = bias + (expert * D + gl.minimum(first + row, D - 1))
            total += gl.load(place, mask=has_bias, other=0.0).to(gl.float32)
        parts = parts + (total * share,)
    y = gl.sum(_joined(parts, ROWS), 0)
    y = gl.reshape(y, [ROWS])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    y = gl.convert_layout(y, flat)
    output = first + _order(gl.arange(0, ROWS, flat), ROWS)
    place = out + (token * D + output)
    y += gl.load(place, mask=output < D, other=0.0).to(gl.float32)
    gl.store(place, y.to(out.dtype.element_ty), mask=output < D)


@gluon.jit
def _order(index, ROWS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The row of each number that _joined() and a reshape leave: its bits in reverse."""
    row = index * 0
    for bit in gl.static_range(8):
        if 1 << bit < ROWS:
            row = row * 2 + index // (1 << bit) % 2
    return row


_launch_gate_up, _launch_down = Launcher(_gate_up), Launcher(_down)


def bf16_few(
    routed: Routed,
    num_chosen: int,
    is_normalised: bool,
    gate_up: torch.Tensor,  # [E, 2 I, D]: gate, then up
    down: torch.Tensor,  # [E, D, I]
    biases: tuple[torch.Tensor | None, torch.Tensor | None],  # [E, 2 I]: gate, then up; [E, D]
    gate: tuple[float, float, float],  # alpha, limit (0: none) and offset: gate · sigmoid(alpha · gate) · (up + offset)
    residual: torch.Tensor,  # [T, D], changed and returned
    tiles: FewTiles,
) -> torch.Tensor:
    """residual + the weighted sum of the outputs of each token's experts, [T, D]."""
    x, keys = routed
    num_tokens, depth = residual.shape
    num_experts, inner_size = len(gate_up), down.shape[2]
    assert x.shape == residual.shape and x.is_contiguous() and residual.is_contiguous() and keys.is_contiguous()
    assert gate_up.shape == (num_experts, 2 * inner_size, depth) and down.shape == (num_experts, depth, inner_size)
    assert gate_up.is_contiguous() and down.is_contiguous() and depth % 8 == inner_size % 8 == 0
    pdl = starts_early(x.device)
    early = {"launch_pdl": True} if pdl else {}
    inner = torch.empty((num_tokens * num_chosen, inner_size), dtype=x.dtype, device=x.device)
    alpha, limit, offset = (float(number) for number in gate)
    chunks = -(-depth // CHUNK.value)
    across = -(-inner_size // (tiles.gate_warps * tiles.gate_steps))
    _launch_gate_up(
        (across * num_tokens * num_chosen, 1, 1),
        (x, keys, gate_up, biases[0], inner, alpha, limit, offset),
        (
            keys.shape[1], num_chosen, depth, inner_size, limit != 0.0, tiles.gate_warps, tiles.gate_steps,
            min(tiles.gate_ahead, chunks * tiles.gate_steps), pdl,
        ),
        {"num_warps": tiles.gate_warps, "maxnreg": tiles.gate_registers} | early,
    )  # fmt: skip
    warps = tiles.down_share << (num_chosen - 1).bit_length()
    chunks = -(-inner_size // (CHUNK.value * tiles.down_share))
    _launch_down(
        (-(-depth // tiles.down_rows) * num_tokens, 1, 1),
        (inner, keys, down, biases[1], residual, num_experts),
        (
            keys.shape[1], num_chosen, is_normalised, depth, inner_size, warps, tiles.down_rows, tiles.down_share,
            min(tiles.down_ahead, chunks * tiles.down_rows), pdl,
        ),
        {"num_warps": warps, "maxnreg": tiles.down_registers} | early,
    )  # fmt: skip
    return residual
