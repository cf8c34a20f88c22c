"""y = x · Wᵀ for the tensor cores of compute capability 9: one warp fetches, two groups of four warps multiply.
Knows nothing of layers, nor of when it pays: `product_hopper_plan` deals out the work.

Tiles of the result are dealt out whole, or a tile's K is shared by several programs. Each of those leaves its sums in
scratch memory and counts itself; the last to arrive adds all of them up, in their order, so that results do not depend on
it. The residual is where the first of them begins to sum: its read hides behind the first fetch."""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from benchmarks.kernels.candidates.product_hopper_plan import BLOCK_K, MAX_TILE, SHARED_TILES, Choice, plan
from benchmarks.kernels.candidates.product_hopper_work import Shape, Work, count_pieces, find_piece, owner, place_tile
from octavo.kernels.launch import Descriptors, Launcher

PANEL = gl.constexpr(BLOCK_K)  # numbers of K: 128 bytes, the widest swizzle
PANEL_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
MAX_REGISTERS = 168  # a thread's share of 65536 with 12 warps; the consumers take what the producer gives back


@gluon.jit
def _fetch_side(w, blocks, ready, work, at, output, number, WIDTH: gl.constexpr, shape):  # type: ignore[no-untyped-def]
    """WIDTH rows of W, or half as many of gate and of up, into the number-th block of the ring."""
    PIECE: gl.constexpr = w.block_type.shape[0]
    PARTS: gl.constexpr = 2 if shape.GATED else 1
    for part in gl.static_range(PARTS):
        for piece in gl.static_range(WIDTH // PARTS // PIECE):
            place = blocks.index(number * (WIDTH // PIECE) + part * (WIDTH // PARTS // PIECE) + piece)
            tma.async_copy_global_to_shared(w, [output + part * work.n + piece * PIECE, at], ready, place)


@gluon.jit
def _fetch_weights(w, rings, ready, work, at, output, slot, shape):  # type: ignore[no-untyped-def]
    _, wide, narrow = rings
    PARTS: gl.constexpr = 2 if shape.GATED else 1
    for side in gl.static_range(shape.SIDES):
        begin = output + side * (shape.WIDE + shape.NARROW) // PARTS
        _fetch_side(w, wide, ready, work, at, begin, slot * shape.SIDES + side, shape.WIDE, shape)
        if shape.NARROW > 0:
            _fetch_side(
                w, narrow, ready, work, at, begin + shape.WIDE // PARTS, slot * shape.SIDES + side, shape.NARROW, shape
            )


@gluon.jit
def _produce(x, w, work, rings, full, empty, shape):  # type: ignore[no-untyped-def]
    """The fetching warp. What the first slots need of W is fetched before x is there."""
    inputs, _wide, _narrow = rings
    BYTES: gl.constexpr = (shape.ROWS + (shape.WIDE + shape.NARROW) * shape.SIDES) * PANEL * 2
    num_pieces, parts = count_pieces(work)
    number = 0
    for step in range(num_pieces):
        tile, first, count = find_piece(work, step, parts)
        row, output = place_tile(work, tile, shape)
        begun = 0
        if step == 0:
            begun = gl.minimum(count, shape.STAGES)
            for slot in range(begun):
                mbarrier.expect(full.index(slot), BYTES)
                _fetch_weights(w, rings, full.index(slot), work, (first + slot) * PANEL, output, slot, shape)
            if shape.PDL:
                gdc_wait()
            for slot in range(begun):
                at = [row, (first + slot) * PANEL]
                tma.async_copy_global_to_shared(x, at, full.index(slot), inputs.index(slot))
            number = begun
        for panel in range(first + begun, first + count):
            slot = number % shape.STAGES
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), (number // shape.STAGES & 1) ^ 1)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(x, [row, panel * PANEL], ready, inputs.index(slot))
            _fetch_weights(w, rings, ready, work, panel * PANEL, output, slot, shape)
            number += 1


@gluon.jit
def _multiply(rings, full, empty, number, count, acc, more, begins, shape, CONSUMER: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over `count` panels, the ring's from `number` on. One product is under way while the next is issued."""
    inputs, wide, narrow = rings
    # Products of one panel: what may still be under way when those of the panel before have ended.
    PRODUCTS: gl.constexpr = 1 if shape.NARROW == 0 else 2
    for step in range(count):
        slot = (number + step) % shape.STAGES
        mbarrier.wait(full.index(slot), (number + step) // shape.STAGES & 1)
        if shape.SIDES == 1:
            left = inputs.index(slot * 2 + CONSUMER)
            side = slot
        else:
            left = inputs.index(slot)
            side = slot * 2 + CONSUMER
        sums = begins | (step > 0)
        acc = warpgroup_mma(left, wide.index(side).permute((1, 0)), acc, use_acc=sums, is_async=True)
        if shape.NARROW > 0:
            more = warpgroup_mma(left, narrow.index(side).permute((1, 0)), more, use_acc=sums, is_async=True)
            acc, more = warpgroup_mma_wait(PRODUCTS, deps=[acc, more])
        else:
            acc = warpgroup_mma_wait(PRODUCTS, deps=[acc])
        # At the first step nothing was before; its slot is freed by the step after it.
        mbarrier.arrive(empty.index((number + step + shape.STAGES - 1) % shape.STAGES), count=1, pred=step > 0)
    if shape.NARROW > 0:
        acc, more = warpgroup_mma_wait(0, deps=[acc, more])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((number + count - 1) % shape.STAGES), count=1)
    return acc, more


@gluon.jit
def _begin(out, work, row, output, is_first, WIDTH: gl.constexpr, layout: gl.constexpr, ROWS: gl.constexpr, shape):  # type: ignore[no-untyped-def]
    """What sums begin with: zeros, or the residual for those over the first panels."""
    if not shape.RESIDUAL:
        return gl.zeros((ROWS, WIDTH), gl.float32, layout)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    outputs = output + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    mask = (rows < work.num_rows)[:, None] & (outputs < work.n)[None, :] & is_first
    return gl.load(out + rows.to(gl.int64)[:, None] * work.n + outputs[None, :], mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def _halves(acc):  # type: ignore[no-untyped-def]
    """[ROWS, 2 · H] → its left and its right half."""
    HALF: gl.constexpr = acc.shape[1] // 2
    return acc.reshape([acc.shape[0], 2, HALF]).permute((0, 2, 1)).split()


@gluon.constexpr_function
def _wide_layout(rows, columns):  # type: ignore[no-untyped-def]
    """Eight neighbours of a row to a thread: four threads that hold pairs of 32 neighbours trade them."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    registers += [[0, 1 << bit] for bit in range(5, columns.bit_length() - 1)]
    registers += [[1 << bit, 0] for bit in range(6, rows.bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def _store(out, acc, work, row, output, shape):  # type: ignore[no-untyped-def]
    if shape.GATED:
        gate, up = _halves(acc)
        acc = gate / (1.0 + gl.exp(-gate)) * up
    result = acc.to(out.dtype.element_ty)
    layout: gl.constexpr = _wide_layout(acc.shape[0], acc.shape[1]) if shape.TRADES else result.type.layout
    result = gl.convert_layout(result, layout)
    rows = row + gl.arange(0, result.shape[0], gl.SliceLayout(1, layout))
    outputs = output + gl.arange(0, result.shape[1], gl.SliceLayout(0, layout))
    mask = (rows < work.num_rows)[:, None] & (outputs < work.n)[None, :]
    gl.store(out + rows.to(gl.int64)[:, None] * work.n + outputs[None, :], result, mask=mask)


@gluon.jit
def _cells(scratch, index, acc):  # type: ignore[no-untyped-def]
    """Where the index-th share of a consumer's sums lies."""
    layout: gl.constexpr = acc.type.layout
    rows = gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    columns = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    return scratch + index * (acc.shape[0] * acc.shape[1]) + rows[:, None] * acc.shape[1] + columns[None, :]


@gluon.jit
def _gather(scratch, arrivals, work, tile, first, acc, more, shape, CONSUMER: gl.constexpr):  # type: ignore[no-untyped-def]
    """Leaves this program's sums of a shared tile to the others → whether it was the last, and the tile's sums if so."""
    begin = (tile - work.whole) * work.depth
    lowest, highest = owner(work, begin), owner(work, begin + work.depth - 1)
    # A program has at most two parts that are not whole: the end of a tile, and the beginning of another.
    mine = (gl.program_id(0) * 2 + (first == 0).to(gl.int32)) * 2 + CONSUMER
    spare = scratch + gl.num_programs(0) * 4 * (acc.shape[0] * shape.WIDE)
    gl.store(_cells(scratch, mine, acc), acc)
    if shape.NARROW > 0:
        gl.store(_cells(spare, mine, more), more)
    gl.thread_barrier()  # all threads' stores before the one thread that counts this program
    counter = arrivals + (tile - work.whole) * 2 + CONSUMER
    arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    is_last = arrived == highest - lowest
    if is_last:
        gl.store(counter, 0)  # ready for the next launch
        acc = gl.zeros_like(acc)
        more = gl.zeros_like(more)
        for program in range(lowest, highest + 1):
            theirs = (program * 2 + (program == lowest).to(gl.int32)) * 2 + CONSUMER
            # .cg: the other programs' stores lie in the L2 cache; this one's L1 cache may hold an older launch's.
            acc += gl.load(_cells(scratch, theirs, acc), cache_modifier=".cg")
            if shape.NARROW > 0:
                more += gl.load(_cells(spare, theirs, more), cache_modifier=".cg")
    return is_last, acc, more


@gluon.jit
def _consume(out, scratch, arrivals, work, rings, full, empty, shape, CONSUMER: gl.constexpr):  # type: ignore[no-untyped-def]
    """Four warps: their half of each tile, by rows of x or by rows of W."""
    ROWS: gl.constexpr = shape.ROWS if shape.SIDES == 2 else shape.ROWS // 2
    OUTPUTS: gl.constexpr = (shape.WIDE + shape.NARROW) // (2 if shape.GATED else 1)
    FIRST: gl.constexpr = shape.WIDE // (2 if shape.GATED else 1)
    SECOND: gl.constexpr = 16 if shape.NARROW == 0 else shape.NARROW
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.WIDE, 16])
    other_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SECOND, 16])
    num_pieces, parts = count_pieces(work)
    if shape.PDL and shape.RESIDUAL:
        gdc_wait()
    number = 0
    for step in range(num_pieces):
        tile, first, count = find_piece(work, step, parts)
        row, output = place_tile(work, tile, shape)
        if shape.SIDES == 1:
            row += CONSUMER * ROWS
        else:
            output += CONSUMER * OUTPUTS
        acc = _begin(out, work, row, output, first == 0, shape.WIDE, layout, ROWS, shape)
        more = gl.zeros((64, 16), gl.float32, other_layout)
        if shape.NARROW > 0:
            more = _begin(out, work, row, output + FIRST, first == 0, SECOND, other_layout, ROWS, shape)
        acc, more = _multiply(rings, full, empty, number, count, acc, more, shape.RESIDUAL, shape, CONSUMER)
        number += count
        is_done = True
        if count < work.depth:
            is_done, acc, more = _gather(scratch, arrivals, work, tile, first, acc, more, shape, CONSUMER)
        if is_done:
            _store(out, acc, work, row, output, shape)
            if shape.NARROW > 0:
                _store(out, more, work, row, output + FIRST, shape)


@gluon.jit
def _barriers(NUM: gl.constexpr, COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUM):
        mbarrier.init(barriers.index(index), count=COUNT)
    return barriers


@gluon.jit(do_not_specialize=["num_rows", "depth", "whole", "shared", "group"])
def _product(  # type: ignore[no-untyped-def]
    x,  # descriptor of x [M, K] in blocks [ROWS, 64]
    w,  # descriptor of W [N, K] in blocks [PIECE, 64]
    out,  # [M, n]
    scratch,  # float32: of each program two parts of tiles
    arrivals,  # [shared tiles, 2] int32, zeros before and after
    num_rows, n, depth, whole, shared, group,
    WIDE: gl.constexpr, NARROW: gl.constexpr, SIDES: gl.constexpr, GATED: gl.constexpr, RESIDUAL: gl.constexpr,
    STAGES: gl.constexpr, TRADES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = x.block_type.shape[0]
    PIECE: gl.constexpr = w.block_type.shape[0]
    shape = Shape(ROWS, WIDE, NARROW, SIDES, GATED, RESIDUAL, STAGES, TRADES, PDL)
    work = Work(num_rows, n, depth, whole, shared, group)
    if PDL:
        gdc_launch_dependents()
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, PANEL], x.layout)
    wide = gl.allocate_shared_memory(x.dtype, [STAGES * SIDES * WIDE // PIECE, PIECE, PANEL], w.layout)
    # Pieces lie one behind the other: to the products they are one block.
    wide_blocks = wide._reinterpret(x.dtype, [STAGES * SIDES, WIDE, PANEL], w.layout)
    narrow = wide
    narrow_blocks = wide_blocks
    if NARROW > 0:
        narrow = gl.allocate_shared_memory(x.dtype, [STAGES * SIDES * NARROW // PIECE, PIECE, PANEL], w.layout)
        narrow_blocks = narrow._reinterpret(x.dtype, [STAGES * SIDES, NARROW, PANEL], w.layout)
    input_blocks = inputs
    if SIDES == 1:
        input_blocks = inputs._reinterpret(x.dtype, [STAGES * 2, ROWS // 2, PANEL], x.layout)
    full, empty = _barriers(STAGES, 1), _barriers(STAGES, 2)
    rings, in_rings = (input_blocks, wide_blocks, narrow_blocks), (inputs, wide, narrow)
    gl.warp_specialize(
        [
            (_consume, (out, scratch, arrivals, work, rings, full, empty, shape, 0)),
            (_consume, (out, scratch, arrivals, work, rings, full, empty, shape, 1)),
            (_produce, (x, w, work, in_rings, full, empty, shape)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


_launch_product = Launcher(_product)
_panels = Descriptors(lambda *parts: TensorDescriptor(*parts, PANEL_LAYOUT))


@cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _scratch_of(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums and arrivals, shared by all launches on a device: they must follow one another, on one stream."""
    assert not torch.cuda.is_current_stream_capturing(), "run a product once before a capture"
    numbers = torch.empty(2 * num_processors(device) * MAX_TILE, dtype=torch.float32, device=device)
    return numbers, torch.zeros(2 * SHARED_TILES, dtype=torch.int32, device=device)


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Half precision, and rows that copies can begin at."""
    is_half = x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype
    return is_half and x.stride(1) == 1 and x.stride(0) % 8 == 0 and weight.is_contiguous() and x.shape[1] % 8 == 0


def product(
    x: torch.Tensor,  # [M, K]
    weight: torch.Tensor,  # [N, K]
    choice: Choice,
    *,
    residual: torch.Tensor | None = None,  # [M, N]: the product is added to it, in place, and it is returned
    is_gated: bool = False,  # the weight holds a gate's rows, then up's: [M, N / 2] of silu(gate) · up
    pdl: bool = False,
) -> torch.Tensor:
    """[M, N] or [M, N / 2], summed in float32 and rounded once."""
    num_rows, k = x.shape
    width = weight.shape[0]
    n = width // 2 if is_gated else width
    assert fits(x, weight) and weight.shape[1] == k and not (is_gated and residual is not None)
    assert n % 8 == 0 and width == n * (2 if is_gated else 1)
    if residual is None:
        out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    else:
        assert residual.is_contiguous() and residual.shape == (num_rows, n) and residual.dtype == x.dtype
        out = residual
    if num_rows == 0:
        return out
    work = plan(num_rows, n, k, choice, is_gated, num_processors(x.device))
    scratch, arrivals = _scratch_of(x.device)
    assert work.shared <= SHARED_TILES and work.scratch_numbers(choice) <= scratch.numel()
    wide, narrow = choice.widths
    rows, weights = (
        _panels(tensor, tuple(tensor.shape), tensor.stride(), (height, BLOCK_K))
        for tensor, height in ((x, choice.block_m), (weight, choice.piece(is_gated)))
    )
    options = {"num_warps": 4, "maxnreg": MAX_REGISTERS}
    if pdl:
        options["launch_pdl"] = True
    _launch_product(
        (work.num_programs, 1, 1),
        (rows, weights, out, scratch, arrivals, num_rows, n, work.depth, work.whole, work.shared, choice.group),
        (wide, narrow, choice.sides, is_gated, residual is not None, choice.stages, choice.trades(is_gated), pdl),
        options,
    )
    return out
