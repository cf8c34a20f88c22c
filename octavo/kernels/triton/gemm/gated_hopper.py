"""act(gate) * up of x · Wᵀ for the tensor cores of compute capability 9: one warp fetches, two groups of four warps multiply.
`gated` decides when it is used.

A tile holds as many rows of gate as of up, so that a thread has the sums of both. Each program loops over its share of the
tiles; the fetching warp runs ahead, into the next tile too."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.elementwise.activation_gluon import activate
from octavo.kernels.triton.gemm.gated import BLOCK_K, Tile
from octavo.kernels.triton.runtime.chip import starts_early
from octavo.kernels.triton.runtime.launch import Descriptors, Launcher

PANEL = gl.constexpr(BLOCK_K)  # numbers of K: 128 bytes, the widest swizzle
PANEL_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
MAX_REGISTERS = 168  # a thread's share of 65536 with 12 warps; the consumers get what the producer gives up
GROUP = gl.constexpr(8)  # consecutive tiles along the rows of x before the next rows of W


@aggregate
class Shape:
    """Compile-time constants."""

    ROWS: gl.constexpr  # rows of x in a tile
    WIDE: gl.constexpr  # rows of W in a consumer's first product: half of gate, half of up
    NARROW: gl.constexpr  # rows of W in its second product, or 0: 192 is 128 and 64, because sizes are powers of two
    SIDES: gl.constexpr  # 1: the consumers split the rows of x. 2: they split the rows of W
    NAME: gl.constexpr  # of the activation
    STAGES: gl.constexpr
    TRADES: gl.constexpr  # threads exchange results to store 16 bytes each
    PDL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ROWS, WIDE, NARROW, SIDES, NAME, STAGES, TRADES, PDL):  # type: ignore[no-untyped-def]
        self.ROWS = gl.constexpr(ROWS)
        self.WIDE = gl.constexpr(WIDE)
        self.NARROW = gl.constexpr(NARROW)
        self.SIDES = gl.constexpr(SIDES)
        self.NAME = gl.constexpr(NAME)
        self.STAGES = gl.constexpr(STAGES)
        self.TRADES = gl.constexpr(TRADES)
        self.PDL = gl.constexpr(PDL)


@aggregate
class Work:
    num_rows: gl.tensor
    n: gl.tensor  # outputs
    depth: gl.tensor  # panels of K
    tiles: gl.tensor

    @gluon.constexpr_function
    def __init__(self, num_rows, n, depth, tiles):  # type: ignore[no-untyped-def]
        self.num_rows = num_rows
        self.n = n
        self.depth = depth
        self.tiles = tiles


@gluon.jit
def _place(work, tile, shape):  # type: ignore[no-untyped-def]
    """First row of x and first output of a tile. Consecutive tiles share rows of W, then rows of x."""
    OUTPUTS: gl.constexpr = (shape.WIDE + shape.NARROW) * shape.SIDES // 2
    down = gl.cdiv(work.num_rows, shape.ROWS)
    in_group = GROUP * gl.cdiv(work.n, OUTPUTS)
    top = tile // in_group * GROUP
    height = gl.minimum(down - top, GROUP)
    inner = tile % in_group
    return (top + inner % height) * shape.ROWS, inner // height * OUTPUTS


@gluon.jit
def _fetch_side(w, blocks, ready, work, at, output, number, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """Fetch WIDTH rows of W, half of gate and half of up, into the number-th block of the ring."""
    PIECE: gl.constexpr = w.block_type.shape[0]
    for part in gl.static_range(2):
        for piece in gl.static_range(WIDTH // 2 // PIECE):
            place = blocks.index(number * (WIDTH // PIECE) + part * (WIDTH // 2 // PIECE) + piece)
            tma.async_copy_global_to_shared(w, [output + part * work.n + piece * PIECE, at], ready, place)


@gluon.jit
def _fetch_weights(w, rings, ready, work, at, output, slot, shape):  # type: ignore[no-untyped-def]
    _, wide, narrow = rings
    for side in gl.static_range(shape.SIDES):
        begin = output + side * (shape.WIDE + shape.NARROW) // 2
        number = slot * shape.SIDES + side
        _fetch_side(w, wide, ready, work, at, begin, number, shape.WIDE)
        if shape.NARROW > 0:
            _fetch_side(w, narrow, ready, work, at, begin + shape.WIDE // 2, number, shape.NARROW)


@gluon.jit
def _produce(x, w, work, rings, full, empty, shape):  # type: ignore[no-untyped-def]
    """The fetching warp. It fetches W for the first slots before x is ready."""
    inputs, _wide, _narrow = rings
    BYTES: gl.constexpr = (shape.ROWS + (shape.WIDE + shape.NARROW) * shape.SIDES) * PANEL * 2
    number = 0
    for tile in range(gl.program_id(0), work.tiles, gl.num_programs(0)):
        row, output = _place(work, tile, shape)
        begun = 0
        if number == 0:
            begun = gl.minimum(work.depth, shape.STAGES)
            for slot in range(begun):
                mbarrier.expect(full.index(slot), BYTES)
                _fetch_weights(w, rings, full.index(slot), work, slot * PANEL, output, slot, shape)
            if shape.PDL:
                gdc_wait()
            for slot in range(begun):
                tma.async_copy_global_to_shared(x, [row, slot * PANEL], full.index(slot), inputs.index(slot))
            number = begun
        for panel in range(begun, work.depth):
            slot = number % shape.STAGES
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), (number // shape.STAGES & 1) ^ 1)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(x, [row, panel * PANEL], ready, inputs.index(slot))
            _fetch_weights(w, rings, ready, work, panel * PANEL, output, slot, shape)
            number += 1


@gluon.jit
def _multiply(rings, full, empty, number, count, acc, more, shape, CONSUMER: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over `count` panels of the ring from `number` on. One panel's products run while the next one's are issued."""
    inputs, wide, narrow = rings
    # Products per panel: as many may be in flight once those of the previous panel have ended.
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
        sums = step > 0
        acc = warpgroup_mma(left, wide.index(side).permute((1, 0)), acc, use_acc=sums, is_async=True)
        if shape.NARROW > 0:
            more = warpgroup_mma(left, narrow.index(side).permute((1, 0)), more, use_acc=sums, is_async=True)
            acc, more = warpgroup_mma_wait(PRODUCTS, deps=[acc, more])
        else:
            acc = warpgroup_mma_wait(PRODUCTS, deps=[acc])
        # The first step has no previous panel to free; its own slot is freed by the next step.
        mbarrier.arrive(empty.index((number + step + shape.STAGES - 1) % shape.STAGES), count=1, pred=step > 0)
    if shape.NARROW > 0:
        acc, more = warpgroup_mma_wait(0, deps=[acc, more])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((number + count - 1) % shape.STAGES), count=1)
    return acc, more


@gluon.jit
def _halves(acc):  # type: ignore[no-untyped-def]
    """[ROWS, 2 · H] → its left and right halves."""
    HALF: gl.constexpr = acc.shape[1] // 2
    return acc.reshape([acc.shape[0], 2, HALF]).permute((0, 2, 1)).split()


@gluon.constexpr_function
def _wide_layout(rows, columns):  # type: ignore[no-untyped-def]
    """A layout with eight neighbours of a row per thread: four threads that hold pairs of 32 neighbours exchange them."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    registers += [[0, 1 << bit] for bit in range(5, columns.bit_length() - 1)]
    registers += [[1 << bit, 0] for bit in range(6, rows.bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def _store(out, acc, work, row, output, shape):  # type: ignore[no-untyped-def]
    gate, up = _halves(acc)
    result = (activate(gate, shape.NAME) * up).to(out.dtype.element_ty)
    layout: gl.constexpr = _wide_layout(result.shape[0], result.shape[1]) if shape.TRADES else result.type.layout
    result = gl.convert_layout(result, layout)
    rows = row + gl.arange(0, result.shape[0], gl.SliceLayout(1, layout))
    outputs = output + gl.arange(0, result.shape[1], gl.SliceLayout(0, layout))
    mask = (rows < work.num_rows)[:, None] & (outputs < work.n)[None, :]
    gl.store(out + rows.to(gl.int64)[:, None] * work.n + outputs[None, :], result, mask=mask)


@gluon.jit
def _consume(out, work, rings, full, empty, shape, CONSUMER: gl.constexpr):  # type: ignore[no-untyped-def]
    """Four consumer warps: half of each tile, split by rows of x or by rows of W."""
    ROWS: gl.constexpr = shape.ROWS if shape.SIDES == 2 else shape.ROWS // 2
    SECOND: gl.constexpr = 16 if shape.NARROW == 0 else shape.NARROW
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.WIDE, 16])
    other_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SECOND, 16])
    number = 0
    for tile in range(gl.program_id(0), work.tiles, gl.num_programs(0)):
        row, output = _place(work, tile, shape)
        if shape.SIDES == 1:
            row += CONSUMER * ROWS
        else:
            output += CONSUMER * ((shape.WIDE + shape.NARROW) // 2)
        acc = gl.zeros((ROWS, shape.WIDE), gl.float32, layout)
        more = gl.zeros((ROWS, SECOND), gl.float32, other_layout)  # unused if there is no second product
        acc, more = _multiply(rings, full, empty, number, work.depth, acc, more, shape, CONSUMER)
        number += work.depth
        _store(out, acc, work, row, output, shape)
        if shape.NARROW > 0:
            _store(out, more, work, row, output + shape.WIDE // 2, shape)


@gluon.jit
def _barriers(NUM: gl.constexpr, COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUM):
        mbarrier.init(barriers.index(index), count=COUNT)
    return barriers


@gluon.jit(do_not_specialize=["num_rows", "depth", "tiles"])
def _product(  # type: ignore[no-untyped-def]
    x,  # descriptor of x [M, K] in blocks [ROWS, 64]
    w,  # descriptor of W [2 n, K] in blocks [PIECE, 64]
    out,  # [M, n]
    num_rows, n, depth, tiles,
    WIDE: gl.constexpr, NARROW: gl.constexpr, SIDES: gl.constexpr, NAME: gl.constexpr,
    STAGES: gl.constexpr, TRADES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = x.block_type.shape[0]
    PIECE: gl.constexpr = w.block_type.shape[0]
    shape = Shape(ROWS, WIDE, NARROW, SIDES, NAME, STAGES, TRADES, PDL)
    work = Work(num_rows, n, depth, tiles)
    if PDL:
        gdc_launch_dependents()
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, PANEL], x.layout)
    wide = gl.allocate_shared_memory(x.dtype, [STAGES * SIDES * WIDE // PIECE, PIECE, PANEL], w.layout)
    # The pieces are contiguous: the products read them as one block.
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
            (_consume, (out, work, rings, full, empty, shape, 0)),
            (_consume, (out, work, rings, full, empty, shape, 1)),
            (_produce, (x, w, work, in_rings, full, empty, shape)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


_launch_product = Launcher(_product)
_panels = Descriptors(lambda *parts: TensorDescriptor(*parts, PANEL_LAYOUT))


def product(
    x: torch.Tensor,  # [M, K]
    weight: torch.Tensor,  # [2 N, K]
    name: str,
    tile: Tile,
    num_processors: int,
    pdl: bool,
) -> torch.Tensor:
    """Launch the product → [M, N]. `gated` has checked types and sizes."""
    num_rows, k = x.shape
    n = weight.shape[0] // 2
    assert x.dtype == weight.dtype and weight.shape[1] == k and weight.is_contiguous()
    assert x.stride(1) == 1 and x.stride(0) % 8 == 0  # rows of a copy are aligned to 16 bytes
    out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    pdl = pdl and starts_early(x.device)
    tiles = tile.num_tiles(num_rows, n)
    rows, weights = (
        _panels(tensor, tuple(tensor.shape), tensor.stride(), (height, BLOCK_K))
        for tensor, height in ((x, tile.block_m), (weight, tile.piece))
    )
    options = {"num_warps": 4, "maxnreg": MAX_REGISTERS}
    if pdl:
        options["launch_pdl"] = True
    _launch_product(
        (min(tiles, num_processors), 1, 1),
        (rows, weights, out, num_rows, n, -(-k // BLOCK_K), tiles),
        (*tile.widths, tile.sides, name, tile.stages, tile.trades, pdl),
        options,
    )
    return out
