"""Products of blocks of rows (`expert_plan`) with their experts' 16-bit weights on the tensor cores of compute capability 9: one
warp fetches, four or eight warps multiply. For steps of many rows per expert.

With a gate, a tile holds as many rows of gate as of up, so that a thread has the sums of both. Each program loops over its
share of the tiles; the fetching warp runs ahead, into the next tile too. A block of few rows takes a tile half as high."""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.moe.expert_plan import FIELDS
from octavo.kernels.triton.runtime.launch import Descriptors, Launcher

PANEL = gl.constexpr(64)  # numbers of K: 128 bytes, the widest swizzle
PANEL_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
PRODUCER_REGISTERS = gl.constexpr(24)
NARROW = gl.constexpr(64)  # rows of a half tile


@aggregate
class Shape:
    """Compile-time constants."""

    ROWS: gl.constexpr  # rows of x in a tile: 64 or 128
    WIDE: gl.constexpr  # rows of W in a tile; with a gate, half of gate, half of up
    STAGES: gl.constexpr
    IS_GATED: gl.constexpr
    IS_CLAMPED: gl.constexpr
    EARLY: gl.constexpr  # the blocks were complete before the kernel was launched
    PDL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ROWS, WIDE, STAGES, IS_GATED, IS_CLAMPED, EARLY, PDL):  # type: ignore[no-untyped-def]
        self.ROWS = gl.constexpr(ROWS)
        self.WIDE = gl.constexpr(WIDE)
        self.STAGES = gl.constexpr(STAGES)
        self.IS_GATED = gl.constexpr(IS_GATED)
        self.IS_CLAMPED = gl.constexpr(IS_CLAMPED)
        self.EARLY = gl.constexpr(EARLY)
        self.PDL = gl.constexpr(PDL)


@aggregate
class Work:
    n: gl.tensor  # outputs of the result
    across: gl.tensor  # tiles of outputs
    depth: gl.tensor  # panels of K
    tiles: gl.tensor

    @gluon.constexpr_function
    def __init__(self, n, across, depth, tiles):  # type: ignore[no-untyped-def]
        self.n = n
        self.across = across
        self.depth = depth
        self.tiles = tiles


@gluon.jit
def _fetch_weights(w, weights, ready, work, expert, output, panel, slot, shape):  # type: ignore[no-untyped-def]
    """output: the tile's first. Rows beyond the expert's last are others', or zeros: their sums are not stored."""
    PARTS: gl.constexpr = 2 if shape.IS_GATED else 1
    PIECE: gl.constexpr = w.block_type.shape[0]
    EACH: gl.constexpr = shape.WIDE // PARTS // PIECE
    for part in gl.static_range(PARTS):
        for piece in gl.static_range(EACH):
            row = (expert * PARTS + part) * work.n + output + piece * PIECE
            place = weights.index((slot * PARTS + part) * EACH + piece)
            tma.async_copy_global_to_shared(w, [row, panel * PANEL], ready, place)


@gluon.jit
def _fetch_x(x, inputs, ready, row, rows, panel, slot, shape):  # type: ignore[no-untyped-def]
    PIECES: gl.constexpr = shape.ROWS // NARROW
    tma.async_copy_global_to_shared(x, [row, panel * PANEL], ready, inputs.index(slot * PIECES))
    if PIECES == 2:  # noqa: SIM102
        if rows > NARROW:
            tma.async_copy_global_to_shared(x, [row + NARROW, panel * PANEL], ready, inputs.index(slot * PIECES + 1))


@gluon.jit
def _expect(ready, rows, shape):  # type: ignore[no-untyped-def]
    if shape.ROWS == NARROW:
        mbarrier.expect(ready, (shape.ROWS + shape.WIDE) * PANEL * 2)
    else:
        if rows > NARROW:
            mbarrier.expect(ready, (shape.ROWS + shape.WIDE) * PANEL * 2)
        else:
            mbarrier.expect(ready, (NARROW + shape.WIDE) * PANEL * 2)


@gluon.jit
def _produce(x, w, blocks, work, inputs, weights, full, empty, shape):  # type: ignore[no-untyped-def]
    """The fetching warp. It fetches W for the first slots before x is ready."""
    PARTS: gl.constexpr = 2 if shape.IS_GATED else 1
    if shape.PDL and not shape.EARLY:
        gdc_wait()
    number = 0
    for tile in range(gl.program_id(0), work.tiles, gl.num_programs(0)):
        its_block = blocks + tile // work.across * FIELDS
        expert = gl.load(its_block)
        if expert >= 0:
            row = gl.load(its_block + 1)
            rows = gl.load(its_block + 2)
            output = tile % work.across * (shape.WIDE // PARTS)
            begun = 0
            if number == 0:
                begun = gl.minimum(work.depth, shape.STAGES)
                for slot in range(begun):
                    _expect(full.index(slot), rows, shape)
                    _fetch_weights(w, weights, full.index(slot), work, expert, output, slot, slot, shape)
                if shape.PDL and shape.EARLY:
                    gdc_wait()
                for slot in range(begun):
                    _fetch_x(x, inputs, full.index(slot), row, rows, slot, slot, shape)
                number = begun
            for panel in range(begun, work.depth):
                slot = number % shape.STAGES
                mbarrier.wait(empty.index(slot), (number // shape.STAGES & 1) ^ 1)
                _expect(full.index(slot), rows, shape)
                _fetch_x(x, inputs, full.index(slot), row, rows, panel, slot, shape)
                _fetch_weights(w, weights, full.index(slot), work, expert, output, panel, slot, shape)
                number += 1


@gluon.jit
def _multiply(inputs, weights, full, empty, number, count, acc, shape, STEP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over `count` panels of the ring from `number` on. One panel's products run while the next one's are issued.
    STEP: blocks of `inputs` per panel."""
    for step in range(count):
        slot = (number + step) % shape.STAGES
        mbarrier.wait(full.index(slot), (number + step) // shape.STAGES & 1)
        right = weights.index(slot).permute((1, 0))
        acc = warpgroup_mma(inputs.index(slot * STEP), right, acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        # The first step has no previous panel to free; its own slot is freed by the next step.
        mbarrier.arrive(empty.index((number + step + shape.STAGES - 1) % shape.STAGES), count=1, pred=step > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((number + count - 1) % shape.STAGES), count=1)
    return acc


@gluon.constexpr_function
def _wide_layout(rows, columns, num_warps):  # type: ignore[no-untyped-def]
    """Eight neighbours of a row per thread: four threads that hold pairs of 32 neighbours exchange them."""
    high = min(num_warps, rows // 16)
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    registers += [[0, 1 << bit] for bit in range(5, columns.bit_length() - 1)]
    registers += [[1 << bit, 0] for bit in range((16 * high).bit_length() - 1, rows.bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    warps = [[16 << bit, 0] for bit in range(high.bit_length() - 1)]
    if high < num_warps:  # two warps share sixteen rows
        at = registers.index([0, columns // 2])
        warps.append(registers.pop(at))
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, columns])


@gluon.jit
def _halves(acc):  # type: ignore[no-untyped-def]
    """[ROWS, 2 · H] → its left and right halves."""
    HALF: gl.constexpr = acc.shape[1] // 2
    return acc.reshape([acc.shape[0], 2, HALF]).permute((0, 2, 1)).split()


@gluon.jit
def _biased(acc, bias, first, end):  # type: ignore[no-untyped-def]
    output = first + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    return acc + gl.expand_dims(gl.load(bias + output, mask=output < end, other=0.0).to(gl.float32), 0)


@gluon.jit
def _finish(out, order, bias, gate_numbers, acc, work, expert, place, rows, output, shape):  # type: ignore[no-untyped-def]
    """acc [rows, outputs of W]. With a gate, stored by place, else to the rows of the places' pairs."""
    result = acc
    if shape.IS_GATED:
        alpha, limit, offset = gate_numbers
        gate, up = _halves(acc)
        if bias is not None:
            its_bias = bias + expert * (2 * work.n)
            gate = _biased(gate, its_bias, output, work.n)
            up = _biased(up, its_bias + work.n, output, work.n)
        if shape.IS_CLAMPED:  # by comparisons, so that NaN stays NaN
            gate = gl.where(gate > limit, limit, gate)
            up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        result = gate / (1.0 + gl.exp(-alpha * gate)) * (up + offset)
    else:
        if bias is not None:
            result = _biased(acc, bias + expert * work.n, output, work.n)
    halves = result.to(out.dtype.element_ty)
    layout: gl.constexpr = _wide_layout(result.shape[0], result.shape[1], gl.num_warps())
    row = gl.arange(0, result.shape[0], gl.SliceLayout(1, layout))
    outputs = output + gl.arange(0, result.shape[1], gl.SliceLayout(0, layout))
    target = place + row
    if not shape.IS_GATED:
        target = gl.load(order + target, mask=row < rows, other=0)
    mask = gl.expand_dims(row < rows, 1) & gl.expand_dims(outputs < work.n, 0)
    at = gl.expand_dims(target.to(gl.int64) * work.n, 1) + gl.expand_dims(outputs, 0)
    gl.store(out + at, gl.convert_layout(halves, layout), mask=mask)


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    out, order, blocks, bias, gate_numbers, work, rings, full, empty, shape
):  # fmt: skip
    """The consumer warps."""
    whole, pieces, weights = rings
    PARTS: gl.constexpr = 2 if shape.IS_GATED else 1
    PIECES: gl.constexpr = shape.ROWS // NARROW
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, shape.WIDE, 16])
    # Two groups of warps beside each other, each with a part of gate and of up.
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, shape.WIDE // 4, 16])
    if shape.PDL and not shape.EARLY:
        gdc_wait()
    number = 0
    for tile in range(gl.program_id(0), work.tiles, gl.num_programs(0)):
        its_block = blocks + tile // work.across * FIELDS
        expert = gl.load(its_block)
        if expert >= 0:
            place = gl.load(its_block + 1)
            rows = gl.load(its_block + 2)
            output = tile % work.across * (shape.WIDE // PARTS)
            if PIECES == 1:
                acc = gl.zeros((shape.ROWS, shape.WIDE), gl.float32, layout)
                acc = _multiply(whole, weights, full, empty, number, work.depth, acc, shape, 1)
                _finish(out, order, bias, gate_numbers, acc, work, expert, place, rows, output, shape)
            else:
                if rows > NARROW:
                    acc = gl.zeros((shape.ROWS, shape.WIDE), gl.float32, layout)
                    acc = _multiply(whole, weights, full, empty, number, work.depth, acc, shape, 1)
                    _finish(out, order, bias, gate_numbers, acc, work, expert, place, rows, output, shape)
                else:
                    few = gl.zeros((NARROW, shape.WIDE), gl.float32, half_layout)
                    few = _multiply(pieces, weights, full, empty, number, work.depth, few, shape, PIECES)
                    _finish(out, order, bias, gate_numbers, few, work, expert, place, rows, output, shape)
            number += work.depth


@gluon.jit
def _barriers(NUM: gl.constexpr, COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUM):
        mbarrier.init(barriers.index(index), count=COUNT)
    return barriers


@gluon.jit(do_not_specialize=["across", "depth", "tiles"])
def _product(  # type: ignore[no-untyped-def]
    x,  # descriptor of x [P, K] by place in blocks [64, 64]
    w,  # descriptor of W [E · n, K], or [E · 2 n, K] with a gate, in blocks [PIECE, 64]
    out,  # [P, n], by place with a gate, else by pair
    order,  # [P] int32: place → pair
    blocks,  # [number, FIELDS] int32
    bias,  # [E, n], or [E, 2 n] with a gate; or None
    alpha, limit, offset,
    n, across, depth, tiles,
    ROWS: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
    IS_GATED: gl.constexpr, IS_CLAMPED: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    PIECE: gl.constexpr = w.block_type.shape[0]
    shape = Shape(ROWS, WIDE, STAGES, IS_GATED, IS_CLAMPED, EARLY, PDL)
    work = Work(n, across, depth, tiles)
    if PDL:
        if not EARLY:
            gdc_wait()  # what starts after this may then read the blocks at once
        gdc_launch_dependents()
    pieces = gl.allocate_shared_memory(x.dtype, [STAGES * ROWS // NARROW, NARROW, PANEL], x.layout)
    parts = gl.allocate_shared_memory(x.dtype, [STAGES * WIDE // PIECE, PIECE, PANEL], w.layout)
    full, empty = _barriers(STAGES, 1), _barriers(STAGES, 1)
    # Pieces are contiguous: the products read them as one block.
    whole = pieces._reinterpret(x.dtype, [STAGES, ROWS, PANEL], x.layout)
    weights = parts._reinterpret(x.dtype, [STAGES, WIDE, PANEL], w.layout)
    rings = (whole, pieces, weights)
    gl.warp_specialize(
        [
            (_consume, (out, order, blocks, bias, (alpha, limit, offset), work, rings, full, empty, shape)),
            (_produce, (x, w, blocks, work, pieces, parts, full, empty, shape)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


_launch_product = Launcher(_product)
_panels = Descriptors(lambda *parts: TensorDescriptor(*parts, PANEL_LAYOUT))


def registers(num_warps: int, per_processor: int) -> int:
    """A thread's share of a processor's 65536, with four more warps for the fetching one; the consumers get what that gives up."""
    return min(168, 65536 // (32 * (num_warps + 4) * per_processor) // 8 * 8)


class Tile(NamedTuple):
    rows: int  # of x: 64 or 128
    wide: int  # rows of W: 128 or 256
    stages: int
    per_processor: int  # programs


def product(
    x: torch.Tensor,  # [P, K] by place
    weight: torch.Tensor,  # [E, n or 2 n, K]
    out: torch.Tensor,  # [P, n] by place with a gate, else by pair
    order: torch.Tensor,
    blocks: torch.Tensor,
    bias: torch.Tensor | None,
    gate: tuple[float, float, float] | None,
    tile: Tile,
    num_processors: int,
    is_early: bool,
    pdl: bool,
) -> None:
    """Launch one product of all blocks, of at most tile.rows rows each."""
    num_outputs, k = weight.shape[1:]
    n = out.shape[1]
    assert x.dtype == weight.dtype and x.is_contiguous() and weight.is_contiguous() and x.shape[1] == k and k % 8 == 0
    assert num_outputs == (n if gate is None else 2 * n)
    width = tile.wide if gate is None else tile.wide // 2
    across = -(-n // width)
    tiles = len(blocks) * across
    rows = weight.view(-1, k)
    alpha, limit, offset = (1.0, 0.0, 0.0) if gate is None else (float(number) for number in gate)
    num_warps = tile.rows // 16
    options = {"num_warps": num_warps, "maxnreg": registers(num_warps, tile.per_processor)}
    if pdl:
        options["launch_pdl"] = True
    _launch_product(
        (min(tiles, num_processors * tile.per_processor), 1, 1),
        (
            _panels(x, tuple(x.shape), x.stride(), (64, 64)),
            _panels(rows, tuple(rows.shape), rows.stride(), (min(width, 128), 64)),
            out, order, blocks, bias, alpha, limit, offset, n, across, -(-k // 64), tiles,
        ),
        (
            tile.rows, tile.wide, tile.stages, gate is not None, gate is not None and limit != 0.0, is_early, pdl,
        ),
        options,
    )  # fmt: skip
