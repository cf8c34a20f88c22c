"""What `int4_stream` and `fp8_stream` share: the matrix instruction, loads of W, and the end of a sum."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.kernels.triton.elementwise.activation_gluon import activate


@gluon.constexpr_function
def mma(kind, sums, a, b, start=None):  # type: ignore[no-untyped-def]
    d = ", ".join(sums)
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{d}}}, {{{a}}}, {{{b}}}, {{{start or d}}};"


@gluon.jit
def load(pointers, is_there, old, FIRST: gl.constexpr):  # type: ignore[no-untyped-def]
    """The first tiles are always there. After the last outputs what was there stays."""
    if FIRST:
        return gl.load(pointers)
    else:
        return gl.load(pointers, mask=is_there, other=old)


@gluon.jit
def end(  # type: ignore[no-untyped-def]
    sums, buffer, pair, out, residual, bias, scales, num_rows, n,
    KB: gl.constexpr, INTERLEAVED: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Add up the warps' sums of a pair of eight outputs, and store them. buffer: [2 KB, 64] in shared memory. num_rows: 0 stores nothing."""
    # [KB, g 8, q 4, half 2, row 2] → [half, KB, g, row 8]
    parts = gl.permute(gl.reshape(sums, [KB, 8, 4, 2, 2]), [3, 0, 1, 2, 4])
    buffer.store(gl.reshape(parts, [2 * KB, 64]))
    layout: gl.constexpr = gl.BlockedLayout([2, 1], [KB // 2, 64 // KB], [1, KB], [1, 0])
    first = gl.sum(buffer.slice(0, KB).load(layout), 0)
    second = gl.sum(buffer.slice(KB, KB).load(layout), 0)
    place = gl.arange(0, 64, gl.SliceLayout(0, layout))
    row = place % 8
    output = pair * (8 if INTERLEAVED else 16) + place // 8
    if GATED != "":
        distance = n
    else:
        distance = n // 2 if INTERLEAVED else 8
    mask = row < num_rows
    if scales is not None:
        first *= gl.load(scales + output)
        second *= gl.load(scales + output + distance)
    if GATED != "":
        if bias is not None:
            first += gl.load(bias + output).to(gl.float32)
            second += gl.load(bias + n + output).to(gl.float32)
        _finish(activate(first, GATED) * second, out, residual, None, n, row, output, mask)
    else:
        _finish(first, out, residual, bias, n, row, output, mask)
        _finish(second, out, residual, bias, n, row, output + distance, mask)


@gluon.jit
def _finish(y, out, residual, bias, n, row, output, mask):  # type: ignore[no-untyped-def]
    place = row * n + output
    if bias is not None:
        y += gl.load(bias + output, mask=mask, other=0.0).to(gl.float32)
    if residual is not None:
        y += gl.load(residual + place, mask=mask, other=0.0).to(gl.float32)
    gl.store(out + place, y.to(out.dtype.element_ty), mask=mask)
