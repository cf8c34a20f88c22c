"""What `int4_stream` and `fp8_stream` share: the matrix instruction, loads of W, and the end of a sum."""

# Gluon supports tuple + tuple but not (*tuple, more), and allows a variable's tuple to grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

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


@gluon.constexpr_function
def _layout(KB):  # type: ignore[no-untyped-def]
    return gl.BlockedLayout([2, 1], [KB // 2, 64 // KB], [1, KB], [1, 0])


@gluon.jit
def _place(pair, n, KB: gl.constexpr, INTERLEAVED: gl.constexpr, GATED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of the 64 sums of a pair's first eight outputs: row and output; and how far the second eight are."""
    place = gl.arange(0, 64, gl.SliceLayout(0, _layout(KB)))
    if GATED != "":
        distance = n
    else:
        distance = n // 2 if INTERLEAVED else 8
    return place % 8, pair * (8 if INTERLEAVED else 16) + place // 8, distance


@gluon.jit
def ask(pair, residual, scales, num_rows, n, KB: gl.constexpr, INTERLEAVED: gl.constexpr, GATED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Load what a pair's sums are multiplied with and added to. They come from memory: asked for before the sums, they are there when those are."""
    row, output, distance = _place(pair, n, KB, INTERLEAVED, GATED)
    asked = ()
    if scales is not None:
        asked = (gl.load(scales + output), gl.load(scales + output + distance))
    if residual is not None:
        place = row * n + output
        asked = asked + (gl.load(residual + place, mask=row < num_rows, other=0.0),)
        if GATED == "":
            asked = asked + (gl.load(residual + place + distance, mask=row < num_rows, other=0.0),)
    return asked


@gluon.jit
def end(  # type: ignore[no-untyped-def]
    sums, asked, buffer, pair, out, bias, num_rows, n,
    IS_SCALED: gl.constexpr, IS_ADDED: gl.constexpr, KB: gl.constexpr, INTERLEAVED: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Add up the warps' sums of a pair of eight outputs, and store them. buffer: [2 KB, 64] in shared memory. num_rows: 0 stores nothing."""
    # [KB, g 8, q 4, half 2, row 2] → [half, KB, g, row 8]
    parts = gl.permute(gl.reshape(sums, [KB, 8, 4, 2, 2]), [3, 0, 1, 2, 4])
    buffer.store(gl.reshape(parts, [2 * KB, 64]))
    first = gl.sum(buffer.slice(0, KB).load(_layout(KB)), 0)
    second = gl.sum(buffer.slice(KB, KB).load(_layout(KB)), 0)
    row, output, distance = _place(pair, n, KB, INTERLEAVED, GATED)
    if IS_SCALED:
        first *= asked[0]
        second *= asked[1]
    if bias is not None:
        first += gl.load(bias + output).to(gl.float32)
        second += gl.load(bias + output + distance).to(gl.float32)
    NUM_SCALES: gl.constexpr = 2 if IS_SCALED else 0
    if GATED != "":
        first = activate(first, GATED) * second
    if IS_ADDED:
        first += asked[NUM_SCALES].to(gl.float32)
    place = out + row * n + output
    gl.store(place, first.to(out.dtype.element_ty), mask=row < num_rows)
    if GATED == "":
        if IS_ADDED:
            second += asked[NUM_SCALES + 1].to(gl.float32)
        gl.store(place + distance, second.to(out.dtype.element_ty), mask=row < num_rows)
