"""Parts of the tensor-core products skinny_tile and invariant, in which W is the tall side of a tile: the sums over columns
of K, the partial sums of programs that share a tile's K, and the epilogue.

A weight has one part, or two with a gate: the rows of gate, then those of up."""

from functools import cache

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from octavo.kernels.triton.elementwise.activation import activate

SCRATCH_NUMBERS = 1 << 22  # float32: 16 MiB per device
MAX_SHARED_TILES = 8192


@cache
def scratch_of(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums and arrivals, shared by all launches on a device: they must run one after another, on one stream."""
    assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing(), "run a product once before a capture"
    numbers = torch.empty(SCRATCH_NUMBERS, dtype=torch.float32, device=device)
    return numbers, torch.zeros(MAX_SHARED_TILES, dtype=torch.int32, device=device)


@triton.jit  # type: ignore[untyped-decorator]
def _widened(tile, WIDE: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert 8-bit floats exactly to the type WIDE of 16 bits; others stay as they are. Triton's own conversion to bfloat16
    takes an instruction that a chip runs at a quarter of the rate of these."""
    if tile.dtype == WIDE:
        return tile
    elif WIDE == tl.bfloat16 and ASM:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 l, h, a, b;
            .reg .b32 p, q, t;
            mov.b32 {l, h}, $1;
            cvt.rn.f16x2.e4m3x2 t, l;
            mov.b32 {a, b}, t;
            cvt.f32.f16 p, a;
            cvt.f32.f16 q, b;
            cvt.rn.bf16x2.f32 $0, q, p;
            }""",
            "=r,r",
            [tile],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return tile.to(WIDE)


@triton.jit  # type: ignore[untyped-decorator]
def sums_over(  # type: ignore[no-untyped-def]
    x, place, part_stride, row, x_stride, first_tile,
    K: tl.constexpr, COUNT: tl.constexpr, HAS_TAIL: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr = True,
):  # fmt: skip
    """Sums [BLOCK_N, ROWS] of each part over COUNT tiles of BLOCK_K columns from first_tile on. place [BLOCK_N]: points to
    the rows of W's first part; row [ROWS]: of x. HAS_TAIL: some of the columns lie beyond K. If W has 8 bits and x 16, W is
    converted on its way into the product."""
    WIDE: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up_sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for t in range(COUNT):
        at = (first_tile + t) * BLOCK_K + column
        weights = place[:, None] + at[None, :]
        inputs = x + row[None, :] * x_stride + at[:, None]
        if not HAS_TAIL:
            numbers = tl.load(inputs)
            tile = tl.load(weights)
            if PARTS == 2:
                up_tile = tl.load(weights + part_stride)
        else:
            numbers = tl.load(inputs, mask=(at < K)[:, None], other=0.0)
            tile = tl.load(weights, mask=(at < K)[None, :], other=0.0)
            if PARTS == 2:
                up_tile = tl.load(weights + part_stride, mask=(at < K)[None, :], other=0.0)
        sums = tl.dot(_widened(tile, WIDE, ASM), numbers, sums, input_precision="ieee")
        if PARTS == 2:
            up_sums = tl.dot(_widened(up_tile, WIDE, ASM), numbers, up_sums, input_precision="ieee")
    return sums, up_sums


@triton.jit  # type: ignore[untyped-decorator]
def leave_share(  # type: ignore[no-untyped-def]
    sums, up_sums, scratch, arrivals, share,
    SHARES: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store this program's sums in its tile's scratch [SHARES, PARTS, BLOCK_N, ROWS] and count it in arrivals [1]. True: all
    programs of the tile have arrived, and this one must add_shares()."""
    mine = scratch + share * (PARTS * BLOCK_N * ROWS) + _cells(BLOCK_N, ROWS)
    tl.store(mine, sums)
    if PARTS == 2:
        tl.store(mine + BLOCK_N * ROWS, up_sums)
    tl.debug_barrier()  # all threads' stores come before the one thread that counts this program
    return tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == SHARES - 1


@triton.jit  # type: ignore[untyped-decorator]
def add_shares(  # type: ignore[no-untyped-def]
    scratch, arrivals,
    SHARES: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add up the tile's partial sums in the order of shares, and reset its arrivals for the next launch."""
    tl.store(arrivals, 0)
    sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up_sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for share in range(SHARES):
        theirs = scratch + share * (PARTS * BLOCK_N * ROWS) + _cells(BLOCK_N, ROWS)
        # .cg: the other programs' stores are in the L2 cache; this one's L1 cache may hold an older launch's.
        sums += tl.load(theirs, cache_modifier=".cg")
        if PARTS == 2:
            up_sums += tl.load(theirs + BLOCK_N * ROWS, cache_modifier=".cg")
    return sums, up_sums


@triton.jit  # type: ignore[untyped-decorator]
def _cells(BLOCK_N: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def finish(  # type: ignore[no-untyped-def]
    sums, up_sums, out, residual, bias, row_scales, output_scales, num_rows, n, output, row, GATED: tl.constexpr,
):  # fmt: skip
    """Apply scales, bias, gate and residual to the sums, and store them. output [BLOCK_N] and row [ROWS] are indices in
    out [num_rows, n]; those beyond its end are not stored."""
    mask = (output < n)[:, None] & (row < num_rows)[None, :]
    if row_scales is not None:
        sums *= tl.load(row_scales + row, mask=row < num_rows, other=0.0)[None, :]
    if output_scales is not None:
        sums *= tl.load(output_scales + output, mask=output < n, other=0.0)[:, None]
        if GATED != "":
            up_sums *= tl.load(output_scales + n + output, mask=output < n, other=0.0)[:, None]
    if bias is not None:
        sums += tl.load(bias + output, mask=output < n, other=0.0).to(tl.float32)[:, None]
        if GATED != "":
            up_sums += tl.load(bias + n + output, mask=output < n, other=0.0).to(tl.float32)[:, None]
    if GATED != "":
        sums = activate(sums, GATED) * up_sums
    place = row[None, :] * n + output[:, None]
    if residual is not None:
        sums += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=mask)
