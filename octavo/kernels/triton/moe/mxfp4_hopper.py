"""Products of blocks of rows (`expert_plan`) with their experts' MXFP4 weights (`mxfp4_layout`) on the tensor cores of compute
capability 9: one warp fetches, four or eight warps decode and multiply.

W is the tall side of every tile: four warps decode 64 outputs into registers, which is where the matrix instruction takes
its left operand from, while their previous instruction runs. bfloat16 holds every weight exactly. All tiles use the same
matrix instruction and differ only in its width, so that a row's bits depend neither on the other rows nor on their number,
unless programs share K. A block of few rows takes a narrow instruction in a wide tile."""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.gemm.tall_tile import MAX_SHARED_TILES, SCRATCH_NUMBERS, scratch_of
from octavo.kernels.triton.moe.expert_plan import FIELDS
from octavo.kernels.triton.moe.mxfp4_layout import LOWERED, Mxfp4Tensor
from octavo.kernels.triton.runtime.launch import Descriptors, Launcher

X_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
WORDS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)  # a block: [32, 32] words
EXPONENTS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)  # 64 words as [16, 4]
PRODUCER_REGISTERS = gl.constexpr(24)
RAISE = gl.constexpr(2.0**LOWERED)


@gluon.constexpr_function
def _bases(sides):  # type: ignore[no-untyped-def]
    """Which warp has which group of sixteen outputs: the first bits of these eight are warps, the others registers."""
    return min(sides, 2)


@gluon.constexpr_function
def _words_layout(sides):  # type: ignore[no-untyped-def]
    """A thread's eight words of its block [32, 32]: 16 bytes of output g, 16 bytes of output g + 8."""
    lanes = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
    warps = [[8, 0], [16, 0], [32, 0]][: 1 + _bases(sides)]
    more = [[64, 0]] if sides == 4 else []
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [4, 0], *more], lanes, warps, [], [32 * sides, 32])


@gluon.constexpr_function
def _exponents_layout(sides):  # type: ignore[no-untyped-def]
    """A thread's two words of [16, 4]: of outputs g and g + 8 of its warp's sixteen."""
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [1, 0]]
    more = [[32, 0]] if sides == 4 else []
    return gl.DistributedLinearLayout(
        [[2, 0], *more], lanes, [[4, 0], [8, 0], [16, 0]][: 1 + _bases(sides)], [], [16 * sides, 4]
    )


@gluon.constexpr_function
def _store_layout(outputs, rows, num_warps):  # type: ignore[no-untyped-def]
    """Eight or sixteen neighbouring outputs of a row per thread, for which the lanes of a warp trade sums [outputs, rows]."""
    own = outputs // num_warps
    row_bits = min(5, rows.bit_length() - 1)
    lanes = [[0, 1 << bit] for bit in range(row_bits)]
    output_bits = [[1 << bit, 0] for bit in range(own.bit_length() - 1)]
    while len(lanes) < 5:
        lanes.append(output_bits.pop())
    registers = output_bits + [[0, 1 << bit] for bit in range(5, rows.bit_length() - 1)]
    warps = [[own << bit, 0] for bit in range(num_warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [outputs, rows])


# Four registers of two neighbouring columns each, of columns 16 apart, out of one of two words.
# Operands: 4 out; two words; the power of two of the first two registers' columns (twice), and that of the others'.
@gluon.constexpr_function
def _decode_asm(half):  # type: ignore[no-untyped-def]
    word = f"${4 + half}"
    return f"""{{
        .reg .b32 a, b, c, d, t;
        lop3.b32 a, {word}, 0x81C081C0, 0, 0xC0;
        shf.r.wrap.b32 b, {word}, {word}, 4;
        shf.r.wrap.b32 c, {word}, {word}, 10;
        shf.r.wrap.b32 t, {word}, {word}, 14;
        shf.r.wrap.b32 d, {word}, {word}, 6;
        lop3.b32 b, b, 0x81C081C0, 0, 0xC0;
        lop3.b32 c, c, 0x81C081C0, 0, 0xC0;
        lop3.b32 t, t, 0x00400040, 0, 0xC0;
        lop3.b32 d, d, 0x81808180, t, 0xEA;
        mul.bf16x2 $0, a, $6;
        mul.bf16x2 $1, b, $6;
        mul.bf16x2 $2, c, $8;
        mul.bf16x2 $3, d, $8;
    }}"""


@aggregate
class Shape:
    """Compile-time constants."""

    ROWS: gl.constexpr  # rows of x in a tile
    NARROW: (
        gl.constexpr
    )  # a block of so few rows takes a narrower instruction; the rows are fetched in pieces of so many
    SIDES: gl.constexpr  # groups of 64 outputs
    SPLIT: gl.constexpr  # programs that share a tile's K
    STAGES: gl.constexpr
    IS_GATED: gl.constexpr
    IS_CLAMPED: gl.constexpr
    GATHERED: gl.constexpr  # x has the rows in the order of places; else it has one row, for all
    EARLY: gl.constexpr  # the blocks were complete before the kernel was launched
    PDL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ROWS, NARROW, SIDES, SPLIT, STAGES, IS_GATED, IS_CLAMPED, GATHERED, EARLY, PDL):  # type: ignore[no-untyped-def]
        self.ROWS = gl.constexpr(ROWS)
        self.NARROW = gl.constexpr(NARROW)
        self.SIDES = gl.constexpr(SIDES)
        self.SPLIT = gl.constexpr(SPLIT)
        self.STAGES = gl.constexpr(STAGES)
        self.IS_GATED = gl.constexpr(IS_GATED)
        self.IS_CLAMPED = gl.constexpr(IS_CLAMPED)
        self.GATHERED = gl.constexpr(GATHERED)
        self.EARLY = gl.constexpr(EARLY)
        self.PDL = gl.constexpr(PDL)


@aggregate
class Work:
    n: gl.tensor  # outputs of the result
    height: gl.tensor  # blocks of 64 outputs of an expert
    across: gl.tensor  # tiles of outputs
    depth: gl.tensor  # blocks of K
    units: gl.tensor  # tiles times SPLIT

    @gluon.constexpr_function
    def __init__(self, n, height, across, depth, units):  # type: ignore[no-untyped-def]
        self.n = n
        self.height = height
        self.across = across
        self.depth = depth
        self.units = units


@gluon.jit
def _fetch_weights(words, exponents, rings, ready, work, first, block, slot, shape):  # type: ignore[no-untyped-def]
    """first: the first of the tile's blocks of 64 outputs, of all experts'."""
    _, codes, metas = rings
    for side in gl.static_range(shape.SIDES):
        # In the last tile some may belong to the next expert, or to none: their sums are not stored.
        number = (first + side) * work.depth + block
        place = slot * shape.SIDES + side
        tma.async_copy_global_to_shared(words, [number * 32, 0], ready, codes.index(place))
        tma.async_copy_global_to_shared(exponents, [number * 16, 0], ready, metas.index(place))


@gluon.jit
def _fetch_x(x, rings, ready, row, block, slot, rows, shape):  # type: ignore[no-untyped-def]
    inputs, _, _ = rings
    PIECES: gl.constexpr = shape.ROWS // shape.NARROW
    for panel in gl.static_range(2):
        for piece in gl.static_range(PIECES):
            place = inputs.index((slot * 2 + panel) * PIECES + piece)
            if PIECES == 1:
                tma.async_copy_global_to_shared(x, [row, block * 128 + panel * 64], ready, place)
            else:
                # A narrow block needs one piece; others take all of them.
                if (piece == 0) | (rows > shape.NARROW):
                    at = row + piece * shape.NARROW
                    tma.async_copy_global_to_shared(x, [at, block * 128 + panel * 64], ready, place)


@gluon.jit
def _expect(ready, rows, shape):  # type: ignore[no-untyped-def]
    WEIGHTS: gl.constexpr = shape.SIDES * (4096 + 256)
    if shape.NARROW == shape.ROWS:
        mbarrier.expect(ready, shape.ROWS * 256 + WEIGHTS)
    else:
        if rows > shape.NARROW:
            mbarrier.expect(ready, shape.ROWS * 256 + WEIGHTS)
        else:
            mbarrier.expect(ready, shape.NARROW * 256 + WEIGHTS)


@gluon.jit
def _produce(x, words, exponents, blocks, work, rings, full, empty, shape):  # type: ignore[no-untyped-def]
    """The fetching warp. It fetches W for the first slots before x is ready."""
    if shape.PDL and not shape.EARLY:
        gdc_wait()
    number = 0
    for unit in range(gl.program_id(0), work.units, gl.num_programs(0)):
        tile = unit // shape.SPLIT
        share = unit % shape.SPLIT
        its_block = blocks + tile // work.across * FIELDS
        expert = gl.load(its_block)
        if expert >= 0:
            row = gl.load(its_block + 1)
            rows = gl.load(its_block + 2)
            if not shape.GATHERED:
                row = row * 0
            output = expert * work.height + tile % work.across * shape.SIDES
            first = share * work.depth // shape.SPLIT
            end = (share + 1) * work.depth // shape.SPLIT
            begun = first
            if number == 0:
                begun = gl.minimum(end, first + shape.STAGES)
                for block in range(first, begun):
                    slot = block - first
                    _expect(full.index(slot), rows, shape)
                    _fetch_weights(words, exponents, rings, full.index(slot), work, output, block, slot, shape)
                if shape.PDL and shape.EARLY:
                    gdc_wait()
                for block in range(first, begun):
                    _fetch_x(x, rings, full.index(block - first), row, block, block - first, rows, shape)
                number = begun - first
            for block in range(begun, end):
                slot = number % shape.STAGES
                mbarrier.wait(empty.index(slot), (number // shape.STAGES & 1) ^ 1)
                _expect(full.index(slot), rows, shape)
                _fetch_x(x, rings, full.index(slot), row, block, slot, rows, shape)
                _fetch_weights(words, exponents, rings, full.index(slot), work, output, block, slot, shape)
                number += 1


@gluon.jit
def _fours(a, b, c, d, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Four [N, 16] side by side: [N, 64]."""
    both = gl.join(gl.join(a, b), gl.join(c, d))  # [N, 16, 2, 2]
    return gl.convert_layout(gl.reshape(gl.permute(both, [0, 3, 2, 1]), [a.shape[0], 64]), layout, assert_trivial=True)


@gluon.jit
def _power(meta, GROUP: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """[N / 4, 4] words of exponents → [N, 16]: bfloat16's power of two of this group, twice in a register, for every column."""
    N: gl.constexpr = meta.shape[0] * 4
    power = ((meta >> (8 * GROUP)) & 0xFF) * 0x00800080
    vector = gl.convert_layout(gl.reshape(power, [N]), gl.SliceLayout(1, layout), assert_trivial=True)
    return gl.broadcast(gl.expand_dims(vector, 1), gl.full([N, 16], 0, gl.int32, layout))[0]


@gluon.jit
def _decoded(codes, meta, PANEL: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """64 columns of a block, [N, 64]."""
    a, b, c, d = gl.inline_asm_elementwise(
        _decode_asm(PANEL), "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
        [codes, _power(meta, 2 * PANEL, layout), _power(meta, 2 * PANEL + 1, layout)],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    return _fours(a, b, c, d, layout)


@gluon.jit
def _multiply(inputs, words, metas, full, empty, number, count, acc, shape, STEP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over `count` blocks of the ring from `number` on. A panel of 64 columns is decoded while the previous one's
    products run. STEP: blocks of `inputs` per panel."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    before = gl.full([64 * shape.SIDES, 64], 0.0, gl.bfloat16, layout)
    for step in range(count):
        slot = (number + step) % shape.STAGES
        mbarrier.wait(full.index(slot), (number + step) // shape.STAGES & 1)
        codes = words.index(slot).load(_words_layout(shape.SIDES))
        # [warp, half 2, g 8, q 4, k8 2, pair 2] → outputs and columns of the left operand
        codes = gl.reshape(
            gl.permute(gl.reshape(codes, [4 * shape.SIDES, 2, 8, 4, 2, 2]), [0, 1, 2, 4, 3, 5]), [64 * shape.SIDES, 16]
        )
        codes = gl.convert_layout(codes, layout)
        meta = metas.index(slot).load(_exponents_layout(shape.SIDES))
        left = _decoded(codes, meta, 0, layout)
        acc = warpgroup_mma(left, inputs.index(slot * 2 * STEP).permute((1, 0)), acc, use_acc=step > 0, is_async=True)
        acc, before = warpgroup_mma_wait(1, deps=[acc, before])
        # The first step has no previous block to free; its own slot is freed by the next step.
        mbarrier.arrive(empty.index((number + step + shape.STAGES - 1) % shape.STAGES), count=1, pred=step > 0)
        before = _decoded(codes, meta, 1, layout)
        acc = warpgroup_mma(before, inputs.index((slot * 2 + 1) * STEP).permute((1, 0)), acc, is_async=True)
        acc, left = warpgroup_mma_wait(1, deps=[acc, left])
    acc, before = warpgroup_mma_wait(0, deps=[acc, before])
    mbarrier.arrive(empty.index((number + count - 1) % shape.STAGES), count=1)
    return acc


@gluon.jit
def _biased(acc, bias, first, end):  # type: ignore[no-untyped-def]
    output = first + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    return acc + gl.expand_dims(gl.load(bias + output, mask=output < end, other=0.0).to(gl.float32), 1)


@gluon.jit
def _store(out, order, result, work, place, rows, first, shape):  # type: ignore[no-untyped-def]
    """result [outputs, rows] → out[place …, first …] with a gate, else to the rows of the places' pairs. Threads trade numbers
    of 16 bits."""
    layout: gl.constexpr = _store_layout(result.shape[0], result.shape[1], gl.num_warps())
    row = gl.arange(0, result.shape[1], gl.SliceLayout(0, layout))
    outputs = first + gl.arange(0, result.shape[0], gl.SliceLayout(1, layout))
    target = place + row
    if not shape.IS_GATED:
        target = gl.load(order + target, mask=row < rows, other=0)
    mask = gl.expand_dims(row < rows, 0) & gl.expand_dims(outputs < work.n, 1)
    at = gl.expand_dims(target.to(gl.int64) * work.n, 0) + gl.expand_dims(outputs, 1)
    gl.store(out + at, gl.convert_layout(result.to(out.dtype.element_ty), layout), mask=mask)


@gluon.jit
def _finish(out, order, bias, gate_numbers, acc, work, expert, place, rows, tile, shape):  # type: ignore[no-untyped-def]
    """acc [outputs of W, rows]."""
    HEIGHT: gl.constexpr = acc.shape[0]
    acc = acc * RAISE
    if shape.IS_GATED:
        # A warp's sixteen outputs are eight of gate, then eight of up.
        alpha, limit, offset = gate_numbers
        both = gl.permute(gl.reshape(acc, [HEIGHT // 16, 2, 8, acc.shape[1]]), [0, 2, 3, 1])
        gate, up = gl.split(both)
        gate = gl.reshape(gate, [HEIGHT // 2, acc.shape[1]])
        up = gl.reshape(up, [HEIGHT // 2, acc.shape[1]])
        first = tile * (HEIGHT // 2)
        if bias is not None:
            its_bias = bias + expert * (2 * work.n)
            gate = _biased(gate, its_bias, first, work.n)
            up = _biased(up, its_bias + work.n, first, work.n)
        if shape.IS_CLAMPED:  # by comparisons, so that NaN stays NaN
            gate = gl.where(gate > limit, limit, gate)
            up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        result = gate / (1.0 + gl.exp(-alpha * gate)) * (up + offset)
        _store(out, order, result, work, place, rows, first, shape)
    else:
        if bias is not None:
            acc = _biased(acc, bias + expert * work.n, tile * HEIGHT, work.n)
        _store(out, order, acc, work, place, rows, tile * HEIGHT, shape)


@gluon.jit
def _tile(  # type: ignore[no-untyped-def]
    out, order, bias, gate_numbers, scratch, arrivals, inputs, words, metas, full, empty, number,
    work, unit, expert, place, rows, shape, WIDTH: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """One unit with an instruction for WIDTH rows."""
    HEIGHT: gl.constexpr = 64 * shape.SIDES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, WIDTH, 16])
    tile = unit // shape.SPLIT
    share = unit % shape.SPLIT
    first = share * work.depth // shape.SPLIT
    end = (share + 1) * work.depth // shape.SPLIT
    acc = gl.zeros((HEIGHT, WIDTH), gl.float32, layout)
    acc = _multiply(inputs, words, metas, full, empty, number, end - first, acc, shape, STEP)
    output = tile % work.across
    if shape.SPLIT == 1:
        _finish(out, order, bias, gate_numbers, acc, work, expert, place, rows, output, shape)
    else:
        # Partial sums; the last program to arrive adds them up in the order of shares.
        cells = gl.expand_dims(gl.arange(0, HEIGHT, gl.SliceLayout(1, layout)) * WIDTH, 1) + gl.expand_dims(
            gl.arange(0, WIDTH, gl.SliceLayout(0, layout)), 0
        )
        sums = scratch + tile.to(gl.int64) * (shape.SPLIT * HEIGHT * WIDTH) + cells
        gl.store(sums + share * (HEIGHT * WIDTH), acc)
        gl.thread_barrier()  # all threads' stores come before the one thread that counts this program
        if gl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == shape.SPLIT - 1:
            gl.store(arrivals + tile, 0)
            total = gl.zeros((HEIGHT, WIDTH), gl.float32, layout)
            for other in range(shape.SPLIT):
                total += gl.load(sums + other * (HEIGHT * WIDTH), cache_modifier=".cg")
            _finish(out, order, bias, gate_numbers, total, work, expert, place, rows, output, shape)
    return number + end - first


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    out, order, blocks, bias, gate_numbers, scratch, arrivals, work, rings, full, empty, shape
):  # fmt: skip
    """The consumer warps."""
    inputs, pieces, words, metas = rings
    PIECES: gl.constexpr = shape.ROWS // shape.NARROW
    if shape.PDL and not shape.EARLY:
        gdc_wait()
    number = 0
    for unit in range(gl.program_id(0), work.units, gl.num_programs(0)):
        its_block = blocks + unit // shape.SPLIT // work.across * FIELDS
        expert = gl.load(its_block)
        if expert >= 0:
            place = gl.load(its_block + 1)
            rows = gl.load(its_block + 2)
            if PIECES == 1:
                number = _tile(
                    out, order, bias, gate_numbers, scratch, arrivals, inputs, words, metas, full, empty, number,
                    work, unit, expert, place, rows, shape, shape.ROWS, 1,
                )  # fmt: skip
            else:
                if rows > shape.NARROW:
                    number = _tile(
                        out, order, bias, gate_numbers, scratch, arrivals, inputs, words, metas, full, empty, number,
                        work, unit, expert, place, rows, shape, shape.ROWS, 1,
                    )  # fmt: skip
                else:
                    number = _tile(
                        out, order, bias, gate_numbers, scratch, arrivals, pieces, words, metas, full, empty, number,
                        work, unit, expert, place, rows, shape, shape.NARROW, PIECES,
                    )  # fmt: skip


@gluon.jit
def _barriers(NUM: gl.constexpr, COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUM):
        mbarrier.init(barriers.index(index), count=COUNT)
    return barriers


@gluon.jit(do_not_specialize=["height", "across", "depth", "units"])
def _product(  # type: ignore[no-untyped-def]
    x,  # descriptor of x [P or 1, K] in blocks [NARROW, 64]
    words,  # descriptor of the words [E · N / 64 · K / 128 · 32, 32] in blocks [32, 32]
    exponents,  # descriptor of the exponents [E · N / 64 · K / 128 · 16, 4] in blocks [16, 4]
    out,  # [P, n], by place with a gate, else by pair
    order,  # [P] int32: place → pair
    blocks,  # [number, FIELDS] int32
    bias,  # [E, n], or [E, 2 n] with a gate; or None
    scratch,  # [tiles, SPLIT, 64 · SIDES, ROWS] float32, or None if SPLIT is 1
    arrivals,  # [tiles] int32, zero before and after the launch
    alpha, limit, offset,
    n, height, across, depth, units,
    ROWS: gl.constexpr, SIDES: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    IS_GATED: gl.constexpr, IS_CLAMPED: gl.constexpr, GATHERED: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    NARROW: gl.constexpr = x.block_type.shape[0]
    shape = Shape(ROWS, NARROW, SIDES, SPLIT, STAGES, IS_GATED, IS_CLAMPED, GATHERED, EARLY, PDL)
    work = Work(n, height, across, depth, units)
    if PDL:
        if not EARLY:
            gdc_wait()  # what starts after this may then read the blocks at once
        gdc_launch_dependents()
    pieces = gl.allocate_shared_memory(x.dtype, [STAGES * 2 * ROWS // NARROW, NARROW, 64], x.layout)
    codes = gl.allocate_shared_memory(gl.int32, [STAGES * SIDES, 32, 32], words.layout)
    metas = gl.allocate_shared_memory(gl.int32, [STAGES * SIDES, 16, 4], exponents.layout)
    full, empty = _barriers(STAGES, 1), _barriers(STAGES, 1)
    # Pieces of x, and blocks of W, are neighbours: the consumers read them as one.
    inputs = pieces._reinterpret(x.dtype, [STAGES * 2, ROWS, 64], x.layout)
    rings = (
        inputs,
        pieces,
        codes._reinterpret(gl.int32, [STAGES, SIDES * 32, 32], words.layout),
        metas._reinterpret(gl.int32, [STAGES, SIDES * 16, 4], exponents.layout),
    )
    gl.warp_specialize(
        [
            (
                _consume,
                (out, order, blocks, bias, (alpha, limit, offset), scratch, arrivals, work, rings, full, empty, shape),
            ),
            (_produce, (x, words, exponents, blocks, work, (pieces, codes, metas), full, empty, shape)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


_launch_product = Launcher(_product)
_panels = Descriptors(lambda *parts: TensorDescriptor(*parts, X_LAYOUT))
_blocks = Descriptors(lambda *parts: TensorDescriptor(*parts, WORDS_LAYOUT))
_metas = Descriptors(lambda *parts: TensorDescriptor(*parts, EXPONENTS_LAYOUT))


def registers(num_warps: int, per_processor: int) -> int:
    """A thread's share of a processor's 65536, with four more warps for the fetching one; the consumers get what that gives up."""
    return min(168, 65536 // (32 * (num_warps + 4) * per_processor) // 8 * 8)


class Tile(NamedTuple):
    rows: int  # of x: 8 to 256
    narrow: int  # rows of the narrower instruction; the same as rows: there is none
    sides: int  # of 64 outputs: 1, 2 or 4
    split: int  # programs that share a tile's K
    stages: int
    per_processor: int  # programs


def product(
    x: torch.Tensor,  # [P, K] by place, or [1, K]: the row of all places
    weight: Mxfp4Tensor,
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
    height, depth = weight.words.shape[1:3]
    assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] == weight.num_columns
    across = -(-height // tile.sides)
    units = len(blocks) * across * tile.split
    scratch, arrivals = None, None
    if tile.split > 1:
        scratch, arrivals = scratch_of(x.device)
        assert units * 64 * tile.sides * tile.rows <= SCRATCH_NUMBERS and units // tile.split <= MAX_SHARED_TILES
    words, exponents = weight.words.view(-1, 32), weight.exponents.view(-1, 4)
    alpha, limit, offset = (1.0, 0.0, 0.0) if gate is None else (float(number) for number in gate)
    num_warps = 4 * min(2, tile.sides)
    options = {"num_warps": num_warps, "maxnreg": registers(num_warps, tile.per_processor)}
    if pdl:
        options["launch_pdl"] = True
    _launch_product(
        (min(units, num_processors * tile.per_processor), 1, 1),
        (
            _panels(x, tuple(x.shape), x.stride(), (tile.narrow, 64)),
            _blocks(words, tuple(words.shape), words.stride(), (32, 32)),
            _metas(exponents, tuple(exponents.shape), exponents.stride(), (16, 4)),
            out, order, blocks, bias, scratch, arrivals, alpha, limit, offset,
            out.shape[1], height, across, depth, units,
        ),
        (
            tile.rows, tile.sides, tile.split, tile.stages, gate is not None, gate is not None and limit != 0.0,
            len(x) == len(out) and len(x) > 1, is_early, pdl,
        ),
        options,
    )  # fmt: skip
