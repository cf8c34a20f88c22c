"""Which tiles of a matrix product a program of `product_hopper` works on, and where they lie: the kernel's side of its plan.
Knows nothing of memory and of products: numbers in, numbers out."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate


@aggregate
class Shape:
    """What is known when the kernel is compiled."""

    ROWS: gl.constexpr  # rows of x in a tile
    WIDE: gl.constexpr  # rows of W that one consumer multiplies in one go; of gate and up each half of them
    NARROW: gl.constexpr  # and in another, or 0: 192 is 128 and 64, tensors have powers of two
    SIDES: gl.constexpr  # 1: the consumers share x's rows. 2: they share W's
    GATED: gl.constexpr
    RESIDUAL: gl.constexpr
    STAGES: gl.constexpr
    TRADES: gl.constexpr  # threads trade results to store 16 bytes each
    PDL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ROWS, WIDE, NARROW, SIDES, GATED, RESIDUAL, STAGES, TRADES, PDL):  # type: ignore[no-untyped-def]
        self.ROWS = gl.constexpr(ROWS)
        self.WIDE = gl.constexpr(WIDE)
        self.NARROW = gl.constexpr(NARROW)
        self.SIDES = gl.constexpr(SIDES)
        self.GATED = gl.constexpr(GATED)
        self.RESIDUAL = gl.constexpr(RESIDUAL)
        self.STAGES = gl.constexpr(STAGES)
        self.TRADES = gl.constexpr(TRADES)
        self.PDL = gl.constexpr(PDL)


@aggregate
class Work:
    """How the tiles are dealt out: the first `whole` of them to one program each, the `shared` others, of `depth` panels
    each, in equal shares of panels. `group` tiles follow one another down the rows of x."""

    num_rows: gl.tensor
    n: gl.tensor
    depth: gl.tensor
    whole: gl.tensor
    shared: gl.tensor
    group: gl.tensor

    @gluon.constexpr_function
    def __init__(self, num_rows, n, depth, whole, shared, group):  # type: ignore[no-untyped-def]
        self.num_rows = num_rows
        self.n = n
        self.depth = depth
        self.whole = whole
        self.shared = shared
        self.group = group


@gluon.jit
def first_panel(work, program):  # type: ignore[no-untyped-def]
    """Of a program's share of the shared tiles' panels."""
    return program * work.shared * work.depth // gl.num_programs(0)


@gluon.jit
def owner(work, panel):  # type: ignore[no-untyped-def]
    """The program whose share a panel is."""
    return ((panel + 1) * gl.num_programs(0) - 1) // (work.shared * work.depth)


@gluon.jit
def count_pieces(work):  # type: ignore[no-untyped-def]
    """Pieces of work of this program, and how many of them are parts of shared tiles: those come first."""
    program = gl.program_id(0)
    begin, end = first_panel(work, program), first_panel(work, program + 1)
    parts = gl.where(end > begin, (end - 1) // work.depth - begin // work.depth + 1, 0)
    wholes = gl.maximum(work.whole - program + gl.num_programs(0) - 1, 0) // gl.num_programs(0)
    return parts + wholes, parts


@gluon.jit
def find_piece(work, step, parts):  # type: ignore[no-untyped-def]
    """The step-th piece of this program: its tile, first panel and panels."""
    program = gl.program_id(0)
    begin, end = first_panel(work, program), first_panel(work, program + 1)
    tile = begin // work.depth + step
    first = gl.maximum(begin - tile * work.depth, 0)
    count = gl.minimum(end - tile * work.depth, work.depth) - first
    is_part = step < parts
    tile = gl.where(is_part, tile + work.whole, program + (step - parts) * gl.num_programs(0))
    return tile, gl.where(is_part, first, 0), gl.where(is_part, count, work.depth)


@gluon.jit
def place_tile(work, tile, shape):  # type: ignore[no-untyped-def]
    """First row of x and first output of a tile. Tiles next to one another share rows of W, then rows of x."""
    OUTPUTS: gl.constexpr = (shape.WIDE + shape.NARROW) * shape.SIDES // (2 if shape.GATED else 1)
    down = gl.cdiv(work.num_rows, shape.ROWS)
    in_group = work.group * gl.cdiv(work.n, OUTPUTS)
    top = tile // in_group * work.group
    height = gl.minimum(down - top, work.group)
    inner = tile % in_group
    return (top + inner % height) * shape.ROWS, inner // height * OUTPUTS
