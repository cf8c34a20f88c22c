"""y = x · Wᵀ for 4-bit weights (`int4_layout`) on the tensor cores of compute capability 9: one warp fetches, four or eight
warps decode and multiply. `int4` decides when it is used.

W is the tall side of every tile: four warps decode 64 outputs into registers, which is where the matrix instruction takes
its left operand from, while their previous instruction runs. A weight is rounded once to the type of x, as decoding it
beforehand would. All row counts use the same matrix instruction and differ only in its width, and K is divided by the
weight's shape alone, so that a row's bits depend neither on the other rows nor on their number."""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.elementwise.activation_gluon import activate
from octavo.kernels.triton.gemm.int4_layout import Int4Tensor
from octavo.kernels.triton.gemm.tall_tile import MAX_SHARED_TILES, SCRATCH_NUMBERS, scratch_of
from octavo.kernels.triton.runtime.launch import Descriptors, Launcher

X_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
CODES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)  # a block: [32, 32] words
SCALES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)  # 64 words as [16, 4]
GROUP = gl.constexpr(8)  # consecutive tiles along the rows of x before the next rows of W
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.constexpr_function
def _words_layout(sides):  # type: ignore[no-untyped-def]
    """A thread's eight words of its block [32, 32]: 16 bytes of output g, 16 bytes of output g + 8."""
    lanes = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
    warps = [[8, 0], [16, 0], [32, 0]][: 1 + sides]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [4, 0]], lanes, warps, [], [32 * sides, 32])


@gluon.constexpr_function
def _scales_layout(sides):  # type: ignore[no-untyped-def]
    """A thread's two scales of [16, 4]: of outputs g and g + 8 of its warp's sixteen."""
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [1, 0]]
    return gl.DistributedLinearLayout([[2, 0]], lanes, [[4, 0], [8, 0], [16, 0]][: 1 + sides], [], [16 * sides, 4])


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


@gluon.constexpr_function
def _decode_asm(half, subgroups, is_bf16):  # type: ignore[no-untyped-def]
    """Assembly that makes four registers of two neighbouring columns each, of columns 16 apart, out of one of two words.

    Operands: 4 out; two words, of which the half-th has these columns; then for each group of columns that these four meet the
    zeros and scales of both (each twice in a register), and with bfloat16 what rounding the scales left."""
    kind = "bf16" if is_bf16 else "f16"
    magic = "0x43004300" if is_bf16 else "0x64006400"
    groups = max(1, subgroups // 2)
    each = 3 if is_bf16 else 2
    lines = ["{", ".reg .b32 t, c;"]
    for j in range(4):
        first = 6 + each * (j * groups // 4)
        source = f"${4 + half}"
        if j:
            lines.append(f"shr.u32 t, {source}, {4 * j};")
            source = "t"
        lines.append(f"lop3.b32 c, {source}, 0x000F000F, {magic}, 0xEA;")
        lines.append(f"sub.{kind}x2 c, c, ${first};")
        if is_bf16:
            lines.append(f"mul.bf16x2 t, c, ${first + 2};")
            lines.append(f"fma.rn.bf16x2 ${j}, c, ${first + 1}, t;")
        else:
            lines.append(f"mul.f16x2 ${j}, c, ${first + 1};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _decode_constraints(subgroups, is_bf16):  # type: ignore[no-untyped-def]
    return ",".join(["=&r"] * 4 + ["r"] * (2 + max(1, subgroups // 2) * (3 if is_bf16 else 2)))


@aggregate
class Shape:
    """Compile-time constants."""

    ROWS: gl.constexpr  # rows of x in a tile
    SIDES: gl.constexpr  # groups of four consumer warps, 64 outputs each
    SUB: gl.constexpr  # groups of columns with scales of their own in a block
    SPLIT: gl.constexpr  # programs that share a tile's K
    STAGES: gl.constexpr
    INTERLEAVED: gl.constexpr
    GATED: gl.constexpr  # an activation's name, or ""
    PDL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ROWS, SIDES, SUB, SPLIT, STAGES, INTERLEAVED, GATED, PDL):  # type: ignore[no-untyped-def]
        self.ROWS = gl.constexpr(ROWS)
        self.SIDES = gl.constexpr(SIDES)
        self.SUB = gl.constexpr(SUB)
        self.SPLIT = gl.constexpr(SPLIT)
        self.STAGES = gl.constexpr(STAGES)
        self.INTERLEAVED = gl.constexpr(INTERLEAVED)
        self.GATED = gl.constexpr(GATED)
        self.PDL = gl.constexpr(PDL)


@aggregate
class Work:
    num_rows: gl.tensor
    n: gl.tensor  # outputs of the result
    across: gl.tensor  # tiles of outputs
    depth: gl.tensor  # blocks of K
    units: gl.tensor  # tiles times SPLIT

    @gluon.constexpr_function
    def __init__(self, num_rows, n, across, depth, units):  # type: ignore[no-untyped-def]
        self.num_rows = num_rows
        self.n = n
        self.across = across
        self.depth = depth
        self.units = units


@gluon.jit
def _place(work, unit, shape):  # type: ignore[no-untyped-def]
    """Row tile, output tile, first and last block of K of a unit. Consecutive units share rows of W, then rows of x."""
    tile = unit // shape.SPLIT
    share = unit % shape.SPLIT
    down = gl.cdiv(work.num_rows, shape.ROWS)
    in_group = GROUP * work.across
    top = tile // in_group * GROUP
    height = gl.minimum(down - top, GROUP)
    inner = tile % in_group
    return (
        top + inner % height,
        inner // height,
        share * work.depth // shape.SPLIT,
        (share + 1) * work.depth // shape.SPLIT,
    )


@gluon.jit
def _fetch_weights(codes, scales, rings, ready, work, output, block, slot, shape):  # type: ignore[no-untyped-def]
    _, words, metas = rings
    for side in gl.static_range(shape.SIDES):
        number = (output * shape.SIDES + side) * work.depth + block
        place = slot * shape.SIDES + side
        tma.async_copy_global_to_shared(codes, [number * 32, 0], ready, words.index(place))
        for sub in gl.static_range(shape.SUB):
            tma.async_copy_global_to_shared(
                scales,
                [(number * shape.SUB + sub) * 16, 0],
                ready,
                metas.index((slot * shape.SUB + sub) * shape.SIDES + side),
            )


@gluon.jit
def _fetch_x(x, rings, ready, row, block, slot):  # type: ignore[no-untyped-def]
    inputs, _, _ = rings
    for panel in gl.static_range(2):
        tma.async_copy_global_to_shared(x, [row, block * 128 + panel * 64], ready, inputs.index(slot * 2 + panel))


@gluon.jit
def _produce(x, codes, scales, work, rings, full, empty, shape):  # type: ignore[no-untyped-def]
    """The fetching warp. It fetches W for the first slots before x is ready."""
    BYTES: gl.constexpr = shape.ROWS * 256 + shape.SIDES * (4096 + shape.SUB * 256)
    number = 0
    for unit in range(gl.program_id(0), work.units, gl.num_programs(0)):
        row, output, first, end = _place(work, unit, shape)
        begun = first
        if number == 0:
            begun = gl.minimum(end, first + shape.STAGES)
            for block in range(first, begun):
                slot = block - first
                mbarrier.expect(full.index(slot), BYTES)
                _fetch_weights(codes, scales, rings, full.index(slot), work, output, block, slot, shape)
            if shape.PDL:
                gdc_wait()
            for block in range(first, begun):
                _fetch_x(x, rings, full.index(block - first), row * shape.ROWS, block, block - first)
            number = begun - first
        for block in range(begun, end):
            slot = number % shape.STAGES
            mbarrier.wait(empty.index(slot), (number // shape.STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), BYTES)
            _fetch_x(x, rings, full.index(slot), row * shape.ROWS, block, slot)
            _fetch_weights(codes, scales, rings, full.index(slot), work, output, block, slot, shape)
            number += 1


@gluon.jit
def _fours(a, b, c, d, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Four [N, 16] side by side: [N, 64]."""
    both = gl.join(gl.join(a, b), gl.join(c, d))  # [N, 16, 2, 2]
    return gl.convert_layout(gl.reshape(gl.permute(both, [0, 3, 2, 1]), [a.shape[0], 64]), layout, assert_trivial=True)


@gluon.jit
def _wide(scale, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """[N / 4, 4] → [N, 16]: the same number for every column."""
    N: gl.constexpr = scale.shape[0] * 4
    vector = gl.convert_layout(gl.reshape(scale, [N]), gl.SliceLayout(1, layout), assert_trivial=True)
    return gl.broadcast(gl.expand_dims(vector, 1), gl.full([N, 16], 0, scale.dtype, layout))[0]


@gluon.jit
def _scales_of(metas, number, HALF: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros, scales and what rounding the scales left, [N, 16] each in the type of x."""
    meta = metas.index(number).load(_scales_layout(metas.shape[1] // 16))
    zero = (meta >> 16).to(gl.int16).to(HALF, bitcast=True)
    scale = (meta & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True)
    if HALF == gl.float16:  # noqa: SIM300
        return _wide(zero, layout), _wide(scale, layout)
    else:
        exact = scale.to(gl.float32)
        rounded = exact.to(gl.bfloat16)
        rest = (exact - rounded.to(gl.float32)).to(gl.bfloat16)
        return _wide(zero, layout), _wide(rounded, layout), _wide(rest, layout)


@gluon.jit
def _decoded(words, metas, number, PANEL: gl.constexpr, HALF: gl.constexpr, layout: gl.constexpr, SUB: gl.constexpr):  # type: ignore[no-untyped-def]
    """64 columns of a block, [N, 64] in the type of x."""
    IS_BF16: gl.constexpr = HALF == gl.bfloat16  # noqa: SIM300
    if SUB == 4:
        scales = _scales_of(metas, number * 4 + 2 * PANEL, HALF, layout) + _scales_of(
            metas, number * 4 + 2 * PANEL + 1, HALF, layout
        )
    elif SUB == 2:
        scales = _scales_of(metas, number * 2 + PANEL, HALF, layout)
    else:
        scales = _scales_of(metas, number, HALF, layout)
    if IS_BF16:
        operands = [words, scales[0], scales[1], scales[2]]
        if SUB == 4:
            operands = [words, scales[0], scales[1], scales[2], scales[3], scales[4], scales[5]]
        a, b, c, d = gl.inline_asm_elementwise(
            _decode_asm(PANEL, SUB, IS_BF16), _decode_constraints(SUB, IS_BF16), operands,
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        operands = [words, scales[0], scales[1]]
        if SUB == 4:
            operands = [words, scales[0], scales[1], scales[2], scales[3]]
        a, b, c, d = gl.inline_asm_elementwise(
            _decode_asm(PANEL, SUB, IS_BF16), _decode_constraints(SUB, IS_BF16), operands,
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return _fours(a, b, c, d, layout)


@gluon.jit
def _multiply(rings, full, empty, number, count, acc, shape, HALF: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over `count` blocks of the ring from `number` on. A panel of 64 columns is decoded while the previous one's
    products run."""
    inputs, words, metas = rings
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    before = gl.full([64 * shape.SIDES, 64], 0.0, HALF, layout)
    for step in range(count):
        slot = (number + step) % shape.STAGES
        mbarrier.wait(full.index(slot), (number + step) // shape.STAGES & 1)
        codes = words.index(slot).load(_words_layout(shape.SIDES))
        # [warp, half 2, g 8, q 4, k8 2, pair 2] → outputs and columns of the left operand
        codes = gl.reshape(
            gl.permute(gl.reshape(codes, [4 * shape.SIDES, 2, 8, 4, 2, 2]), [0, 1, 2, 4, 3, 5]), [64 * shape.SIDES, 16]
        )
        codes = gl.convert_layout(codes, layout)
        left = _decoded(codes, metas, slot, 0, HALF, layout, shape.SUB)
        acc = warpgroup_mma(left, inputs.index(slot * 2).permute((1, 0)), acc, use_acc=step > 0, is_async=True)
        acc, before = warpgroup_mma_wait(1, deps=[acc, before])
        # The first step has no previous block to free; its own slot is freed by the next step.
        mbarrier.arrive(empty.index((number + step + shape.STAGES - 1) % shape.STAGES), count=1, pred=step > 0)
        before = _decoded(codes, metas, slot, 1, HALF, layout, shape.SUB)
        acc = warpgroup_mma(before, inputs.index(slot * 2 + 1).permute((1, 0)), acc, is_async=True)
        acc, left = warpgroup_mma_wait(1, deps=[acc, left])
    acc, before = warpgroup_mma_wait(0, deps=[acc, before])
    mbarrier.arrive(empty.index((number + count - 1) % shape.STAGES), count=1)
    return acc


@gluon.jit
def _biased(acc, bias, first, end):  # type: ignore[no-untyped-def]
    output = first + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    return acc + gl.expand_dims(gl.load(bias + output, mask=output < end, other=0.0).to(gl.float32), 1)


@gluon.jit
def _store(out, residual, result, work, row, first):  # type: ignore[no-untyped-def]
    """result [outputs, rows] → out[row …, first …], added to the residual if there is one. Threads trade numbers of 16 bits."""
    HALF: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = _store_layout(result.shape[0], result.shape[1], gl.num_warps())
    rows = row + gl.arange(0, result.shape[1], gl.SliceLayout(0, layout))
    outputs = first + gl.arange(0, result.shape[0], gl.SliceLayout(1, layout))
    mask = gl.expand_dims(rows < work.num_rows, 0) & gl.expand_dims(outputs < work.n, 1)
    place = gl.expand_dims(rows.to(gl.int64) * work.n, 0) + gl.expand_dims(outputs, 1)
    if residual is not None:
        more = gl.load(residual + place, mask=mask, other=0.0)
        result += gl.convert_layout(more, result.type.layout).to(gl.float32)
    gl.store(out + place, gl.convert_layout(result.to(HALF), layout), mask=mask)


@gluon.jit
def _finish(out, residual, bias, acc, work, row, tile, shape):  # type: ignore[no-untyped-def]
    """acc [outputs of W, rows]."""
    HEIGHT: gl.constexpr = acc.shape[0]
    if shape.INTERLEAVED:
        # A warp's sixteen outputs are eight of gate, then eight of up.
        both = gl.permute(gl.reshape(acc, [HEIGHT // 16, 2, 8, acc.shape[1]]), [0, 2, 3, 1])
        gate, up = gl.split(both)
        gate = gl.reshape(gate, [HEIGHT // 2, acc.shape[1]])
        up = gl.reshape(up, [HEIGHT // 2, acc.shape[1]])
        if shape.GATED != "":
            if bias is not None:
                gate = _biased(gate, bias, tile * (HEIGHT // 2), work.n)
                up = _biased(up, bias + work.n, tile * (HEIGHT // 2), work.n)
            _store(out, residual, activate(gate, shape.GATED) * up, work, row, tile * (HEIGHT // 2))
        else:
            if bias is not None:
                gate = _biased(gate, bias, tile * (HEIGHT // 2), work.n)
                up = _biased(up, bias, work.n // 2 + tile * (HEIGHT // 2), work.n)
            _store(out, residual, gate, work, row, tile * (HEIGHT // 2))
            _store(out, residual, up, work, row, work.n // 2 + tile * (HEIGHT // 2))
    else:
        if bias is not None:
            acc = _biased(acc, bias, tile * HEIGHT, work.n)
        _store(out, residual, acc, work, row, tile * HEIGHT)


@gluon.jit
def _consume(out, residual, bias, scratch, arrivals, work, rings, full, empty, shape):  # type: ignore[no-untyped-def]
    """The consumer warps."""
    HALF: gl.constexpr = out.dtype.element_ty
    HEIGHT: gl.constexpr = 64 * shape.SIDES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * shape.SIDES, 1], [16, shape.ROWS, 16])
    number = 0
    for unit in range(gl.program_id(0), work.units, gl.num_programs(0)):
        row, output, first, end = _place(work, unit, shape)
        acc = gl.zeros((HEIGHT, shape.ROWS), gl.float32, layout)
        acc = _multiply(rings, full, empty, number, end - first, acc, shape, HALF)
        number += end - first
        if shape.SPLIT == 1:
            _finish(out, residual, bias, acc, work, row * shape.ROWS, output, shape)
        else:
            # Partial sums; the last program to arrive adds them up in the order of shares.
            cells = gl.expand_dims(gl.arange(0, HEIGHT, gl.SliceLayout(1, layout)) * shape.ROWS, 1) + gl.expand_dims(
                gl.arange(0, shape.ROWS, gl.SliceLayout(0, layout)), 0
            )
            tile = unit // shape.SPLIT
            sums = scratch + tile.to(gl.int64) * (shape.SPLIT * HEIGHT * shape.ROWS) + cells
            gl.store(sums + unit % shape.SPLIT * (HEIGHT * shape.ROWS), acc)
            gl.thread_barrier()  # all threads' stores come before the one thread that counts this program
            if gl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == shape.SPLIT - 1:
                gl.store(arrivals + tile, 0)
                total = gl.zeros((HEIGHT, shape.ROWS), gl.float32, layout)
                for share in range(shape.SPLIT):
                    total += gl.load(sums + share * (HEIGHT * shape.ROWS), cache_modifier=".cg")
                _finish(out, residual, bias, total, work, row * shape.ROWS, output, shape)


@gluon.jit
def _barriers(NUM: gl.constexpr, COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUM):
        mbarrier.init(barriers.index(index), count=COUNT)
    return barriers


@gluon.jit(do_not_specialize=["num_rows", "across", "depth", "units"])
def _product(  # type: ignore[no-untyped-def]
    x,  # descriptor of x [M, K] in blocks [ROWS, 64]
    codes,  # descriptor of the codes [N / 64 · K / 128 · 32, 32] in blocks [32, 32]
    scales,  # descriptor of the scales [N / 64 · K / 128 · SUB · 16, 4] in blocks [16, 4]
    out,  # [M, n]; the same tensor as residual, if there is one
    residual,  # [M, n] or None
    bias,  # [n], or [2 n] with a gate; or None
    scratch,  # [tiles, SIDES, SPLIT, 64, ROWS] float32, or None if SPLIT is 1
    arrivals,  # [tiles, SIDES] int32, zero before and after the launch
    num_rows, n, across, depth, units,
    SIDES: gl.constexpr, SUB: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    INTERLEAVED: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = x.block_type.shape[0]
    shape = Shape(ROWS, SIDES, SUB, SPLIT, STAGES, INTERLEAVED, GATED, PDL)
    work = Work(num_rows, n, across, depth, units)
    if PDL:
        gdc_launch_dependents()
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES * 2, ROWS, 64], x.layout)
    words = gl.allocate_shared_memory(gl.int32, [STAGES * SIDES, 32, 32], codes.layout)
    metas = gl.allocate_shared_memory(gl.int32, [STAGES * SIDES * SUB, 16, 4], scales.layout)
    full, empty = _barriers(STAGES, 1), _barriers(STAGES, 1)
    # Blocks of the groups of warps are neighbours: the consumers read them as one.
    rings = (
        inputs,
        words._reinterpret(gl.int32, [STAGES, SIDES * 32, 32], codes.layout),
        metas._reinterpret(gl.int32, [STAGES * SUB, SIDES * 16, 4], scales.layout),
    )
    gl.warp_specialize(
        [
            (_consume, (out, residual, bias, scratch, arrivals, work, rings, full, empty, shape)),
            (_produce, (x, codes, scales, work, (inputs, words, metas), full, empty, shape)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


_launch_product = Launcher(_product)
_panels = Descriptors(lambda *parts: TensorDescriptor(*parts, X_LAYOUT))
_blocks = Descriptors(lambda *parts: TensorDescriptor(*parts, CODES_LAYOUT))
_metas = Descriptors(lambda *parts: TensorDescriptor(*parts, SCALES_LAYOUT))


class Tile(NamedTuple):
    rows: int  # of x: 16 to 256
    sides: int  # of 64 outputs: 1 or 2
    split: int  # programs that share a tile's K
    stages: int
    per_processor: int  # programs


def product(
    x: torch.Tensor,
    weight: Int4Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    gated: str,
    tile: Tile,
    num_processors: int,
    pdl: bool,
) -> None:
    """x [M, K] · weight [N, K]ᵀ into out [M, N or N/2]; see `int4.int4_linear`."""
    num_rows = x.shape[0]
    across_blocks, depth = weight.codes.shape[:2]
    assert x.dtype == weight.dtype and x.stride(1) == 1 and x.stride(0) % 8 == 0 and across_blocks % tile.sides == 0
    across = across_blocks // tile.sides
    units = across * -(-num_rows // tile.rows) * tile.split
    scratch, arrivals = None, None
    if tile.split > 1:
        scratch, arrivals = scratch_of(x.device)
        assert units * 64 * tile.sides * tile.rows <= SCRATCH_NUMBERS and units // tile.split <= MAX_SHARED_TILES
    codes, scales = weight.codes.view(-1, 32), weight.scales.view(-1, 4)
    options = {"num_warps": 4 * tile.sides, "maxnreg": 168 if tile.sides == 2 else 128}
    if pdl:
        options["launch_pdl"] = True
    _launch_product(
        (min(units, num_processors * tile.per_processor), 1, 1),
        (
            _panels(x, tuple(x.shape), x.stride(), (tile.rows, 64)),
            _blocks(codes, tuple(codes.shape), codes.stride(), (32, 32)),
            _metas(scales, tuple(scales.shape), scales.stride(), (16, 4)),
            out, residual, bias, scratch, arrivals, num_rows, out.shape[1], across, depth, units,
        ),
        (tile.sides, weight.subgroups, tile.split, tile.stages, weight.is_interleaved, gated, pdl),
        options,
    )  # fmt: skip
