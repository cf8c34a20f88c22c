"""The native products as Python functions over torch tensors. The library is found or compiled at the first use. Shapes and
types are checked here, because C would read past the end: by `check`, which `python -O` keeps, not by assert."""

import ctypes
import functools
import math
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from octavo.kernels.cpu.build import library_path

GROUP = 32  # weights along K that share a scale
PANEL = 16  # columns kept together
_ALIGNMENT = 64


_DECODED = 64  # OCTAVO_DECODED


class BadCall(ValueError):
    """A native call with a shape, a type or an index that it must not get."""


def check(is_right: bool, what: str) -> None:
    if not is_right:
        raise BadCall(what)


class Kind(IntEnum):
    """How weights are stored: OctavoKind in product.h."""

    FLOAT32 = 0
    CODES8 = 1  # Q8_0
    CODES4 = 2  # Q4_0
    CODES4_MINIMUM = 3  # Q4_1
    BFLOAT16 = 4
    CODES5 = 5  # Q5_0
    CODES5_MINIMUM = 6  # Q5_1
    CODES4_NESTED = 7  # Q4_K
    CODES5_NESTED = 8  # Q5_K
    CODES6_NESTED = 9  # Q6_K
    CODES4_IQ4 = 10  # IQ4_NL
    CODES4_IQ4_NESTED = 11  # IQ4_XS
    CODES4_IQ2_NESTED = 12  # IQ2_WIDE, Octavo's own
    CODES2_NESTED = 13  # Q2_K
    # The same storage, decoded on the fly and multiplied in float32: bit for bit the results of FLOAT32 with the decoded
    # weights.
    CODES8_DECODED = 65
    CODES4_DECODED = 66
    CODES4_MINIMUM_DECODED = 67
    CODES5_DECODED = 69
    CODES5_MINIMUM_DECODED = 70
    CODES4_NESTED_DECODED = 71
    CODES5_NESTED_DECODED = 72
    CODES6_NESTED_DECODED = 73
    CODES4_IQ4_DECODED = 74
    CODES4_IQ4_NESTED_DECODED = 75
    CODES4_IQ2_NESTED_DECODED = 76
    CODES2_NESTED_DECODED = 77

    @property
    def is_quantised(self) -> bool:
        """Whether its activations are quantised too."""
        return self.is_packed and not self.is_decoded

    @property
    def is_packed(self) -> bool:
        return self not in (Kind.FLOAT32, Kind.BFLOAT16)

    @property
    def is_decoded(self) -> bool:
        return self >= _DECODED

    @property
    def decoded(self) -> "Kind":
        return Kind(self | _DECODED)

    @property
    def stored_as(self) -> "Kind":
        return Kind(self & ~_DECODED)


GGUF_KINDS = {
    "Q8_0": Kind.CODES8,
    "Q4_0": Kind.CODES4,
    "Q4_1": Kind.CODES4_MINIMUM,
    "Q5_0": Kind.CODES5,
    "Q5_1": Kind.CODES5_MINIMUM,
    "Q4_K": Kind.CODES4_NESTED,
    "Q5_K": Kind.CODES5_NESTED,
    "Q6_K": Kind.CODES6_NESTED,
    "IQ4_NL": Kind.CODES4_IQ4,
    "IQ4_XS": Kind.CODES4_IQ4_NESTED,
    "IQ2_WIDE": Kind.CODES4_IQ2_NESTED,
    "Q2_K": Kind.CODES2_NESTED,
}
_PLAIN = {Kind.FLOAT32: torch.float32, Kind.BFLOAT16: torch.bfloat16}
_FINISHES = {  # (gated, activation) → OctavoFinish
    (False, ""): 0,
    (True, ""): 1,
    (True, "silu"): 1,
    (False, "gelu_tanh"): 2,
    (True, "gelu_tanh"): 3,
    (False, "relu"): 4,
    (False, "gelu"): 5,
}
QUANTS = {  # weights and bytes of one block
    Kind.CODES8: (32, 34),
    Kind.CODES4: (32, 18),
    Kind.CODES4_MINIMUM: (32, 20),
    Kind.CODES5: (32, 22),
    Kind.CODES5_MINIMUM: (32, 24),
    Kind.CODES4_NESTED: (256, 144),
    Kind.CODES5_NESTED: (256, 176),
    Kind.CODES6_NESTED: (256, 210),
    Kind.CODES4_IQ4: (32, 18),
    Kind.CODES4_IQ4_NESTED: (256, 136),
    Kind.CODES4_IQ2_NESTED: (256, 138),
    Kind.CODES2_NESTED: (256, 84),
}
_ROUNDED = (Kind.CODES8, Kind.CODES4, Kind.CODES4_MINIMUM)  # kinds that pack_quantised supports


class Product(ctypes.Structure):
    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("activations", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("finish", ctypes.c_int32),
    ]


_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    "octavo_threads_new": (_POINTER, [_INT, _INT]),
    "octavo_threads_delete": (None, [_POINTER]),
    "octavo_isa": (ctypes.c_char_p, []),
    "octavo_use_isa": (_INT, [ctypes.c_char_p]),
    "octavo_tile_rows": (ctypes.c_int32, [_INT]),
    "octavo_packed_bytes": (_LONG, [_INT, _LONG, _LONG]),
    "octavo_prepared_bytes": (_LONG, [_INT, _LONG, _LONG]),
    "octavo_pack": (None, [_POINTER, _INT, _POINTER, _LONG, _LONG, _POINTER]),
    "octavo_pack_quantised": (None, [_POINTER, _INT, _POINTER, _LONG, _LONG, _POINTER]),
    "octavo_read_columns": (_INT, [_INT, _POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER]),
    "octavo_prepare": (None, [_POINTER, _INT, _POINTER, _LONG, _LONG, _LONG, _POINTER]),
    "octavo_product": (None, [_POINTER, ctypes.POINTER(Product)]),
    "octavo_products": (None, [_POINTER, ctypes.POINTER(Product), _LONG]),
    "octavo_dot_all": (_LONG, [_POINTER, _LONG]),
    "octavo_read_all": (_LONG, [_POINTER, _POINTER, _LONG]),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Load the library. Raises build.NoCompiler if there is neither a library nor a compiler."""
    loaded = ctypes.CDLL(str(library_path()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def isa() -> str:
    name: bytes = library().octavo_isa()
    return name.decode()


def use_isa(name: str) -> bool:
    """Use this instruction set for all later calls, if the CPU supports it; False: it does not. Activations that were
    prepared before are invalid afterwards."""
    return bool(library().octavo_use_isa(name.encode()))


def tile_rows(kind: Kind) -> int:
    """The largest number of rows whose activations are stored interleaved, for products with weights of that kind."""
    rows: int = library().octavo_tile_rows(kind)
    return rows


class Threads:
    """A pool of threads that work together on one call; the calling thread is one of them. One caller at a time.
    `first_cpu`: index among the allowed CPUs from which on each thread except the caller is pinned to one; -1: no pinning."""

    def __init__(self, num_threads: int, first_cpu: int = -1) -> None:
        self.num_threads = num_threads
        self.pointer: int = library().octavo_threads_new(num_threads, first_cpu)

    def close(self) -> None:
        if self.pointer:
            library().octavo_threads_delete(self.pointer)
            self.pointer = 0


@dataclass(frozen=True)
class PackedWeight:
    """A weight W [num_columns, depth], packed in panels."""

    memory: Tensor  # [bytes] uint8, aligned
    kind: Kind
    num_columns: int
    depth: int

    def columns(self, ids: Tensor) -> Tensor:
        """ids [T] int64 → rows of W, [T, depth] float32."""
        check(ids.dtype == torch.int64 and ids.dim() == 1 and ids.is_contiguous(), "ids must be int64 [T]")
        out = torch.empty(len(ids), self.depth)
        status = library().octavo_read_columns(
            self.kind, self.memory.data_ptr(), self.num_columns, self.depth, ids.data_ptr(), len(ids), out.data_ptr()
        )
        check(status == 0, f"an id is not one of {self.num_columns} columns")
        return out


@dataclass(frozen=True)
class PreparedActivations:
    """Activations x [num_rows, depth], prepared for products. Quantised kinds share one form, the others another."""

    memory: Tensor
    is_quantised: bool
    num_rows: int
    depth: int


def packed_bytes(kind: Kind, num_columns: int, depth: int) -> int:
    num_bytes: int = library().octavo_packed_bytes(kind, num_columns, depth)
    return num_bytes


def pack(threads: Threads, rows: Tensor, kind: Kind, memory: Tensor | None = None) -> PackedWeight:
    """Pack rows: [N, K] of the kind's own type for FLOAT32 and BFLOAT16; else GGUF blocks, uint8 [N, bytes of a row]. `memory`: where
    to, aligned and of packed_bytes; None: into memory that is kept as long as the weights packed with it."""
    check(rows.is_contiguous() and rows.dim() == 2, "a weight must be [N, K] and contiguous")
    if kind in _PLAIN:
        check(rows.dtype == _PLAIN[kind], f"a weight of kind {kind.name} must not be {rows.dtype}")
        depth = rows.shape[1]
    else:
        weights, num_bytes = QUANTS[kind.stored_as]
        check(rows.dtype == torch.uint8 and rows.shape[1] % num_bytes == 0, f"rows must be blocks of {num_bytes} bytes")
        depth = rows.shape[1] // num_bytes * weights
    if memory is not None:
        is_right = memory.nbytes == packed_bytes(kind, len(rows), depth) and memory.data_ptr() % _ALIGNMENT == 0
        check(is_right, "memory for a packed weight must be aligned and of its size")
    return _packed(library().octavo_pack, threads, rows, kind, depth, memory)


def pack_quantised(threads: Threads, rows: Tensor, kind: Kind) -> PackedWeight:
    """Round float32 rows [N, K] to `kind` (CODES8, CODES4 or CODES4_MINIMUM) and pack them."""
    is_float = rows.is_contiguous() and rows.dim() == 2 and rows.dtype == torch.float32
    check(
        is_float and rows.shape[1] % GROUP == 0 and kind in _ROUNDED, f"rows must be float32 [N, multiple of {GROUP}]"
    )
    return _packed(library().octavo_pack_quantised, threads, rows, kind, rows.shape[1])


def _packed(
    function, threads: Threads, rows: Tensor, kind: Kind, depth: int, memory: Tensor | None = None
) -> PackedWeight:
    memory = _arena(packed_bytes(kind, len(rows), depth)) if memory is None else memory
    function(threads.pointer, kind, rows.data_ptr(), len(rows), depth, memory.data_ptr())
    return PackedWeight(memory, kind, len(rows), depth)


def prepare(threads: Threads, x: Tensor, kind: Kind) -> PreparedActivations:
    """Prepare x [M, K] float32 (any row stride) once for several products: quantised in groups of 32, or rearranged."""
    check(x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1, "activations must be float32 [M, K]")
    num_rows, depth = x.shape
    check(not kind.is_quantised or depth % GROUP == 0, f"activations must have a multiple of {GROUP} columns")
    memory = aligned(library().octavo_prepared_bytes(kind, num_rows, depth))
    library().octavo_prepare(
        threads.pointer, kind, x.data_ptr(), x.stride(0), num_rows, depth, memory.data_ptr()
    )  # fmt: skip
    return PreparedActivations(memory, kind.is_quantised, num_rows, depth)


def product(
    threads: Threads,
    x: PreparedActivations,
    weight: PackedWeight,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    activation: str = "",
) -> Tensor:
    """y [M, N] = x · Wᵀ (+ bias) (+ residual, which may be y), or relu, gelu or gelu_tanh of it (without residual).
    gated: y [M, N/2] = activation (silu or gelu_tanh) of the first half · the second half."""
    call = product_call(x, weight, y, bias=bias, residual=residual, gated=gated, activation=activation)
    library().octavo_product(threads.pointer, ctypes.byref(call))
    return y


def products(threads: Threads, calls: Sequence[Product]) -> None:
    """Run several products in one call, one after the other."""
    library().octavo_products(threads.pointer, (Product * len(calls))(*calls), len(calls))


def product_call(
    x: PreparedActivations,
    weight: PackedWeight,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    activation: str = "",
) -> Product:
    """The call of product(), to be run later. It holds only addresses: the caller keeps every tensor alive."""
    check(
        x.depth == weight.depth and x.is_quantised == weight.kind.is_quantised,
        "activations and weight must have the same depth and form",
    )
    width = weight.num_columns // 2 if gated else weight.num_columns
    check(
        y.shape == (x.num_rows, width) and y.dtype == torch.float32 and (width == 1 or y.stride(1) == 1),
        f"y must be float32 [{x.num_rows}, {width}]",
    )
    check(
        not gated or (weight.num_columns % (2 * PANEL) == 0 and bias is None and residual is None),
        f"a gated product has a multiple of {2 * PANEL} columns, neither bias nor residual",
    )
    check(
        bias is None or (bias.shape == (width,) and bias.dtype == torch.float32 and bias.is_contiguous()),
        f"a bias must be float32 [{width}]",
    )
    check(
        residual is None or (residual.stride() == y.stride() and residual.shape == y.shape and not activation),
        "a residual must lie as y does",
    )
    return Product(
        weight.memory.data_ptr(),
        x.memory.data_ptr(),
        y.data_ptr(),
        bias.data_ptr() if bias is not None else None,
        residual.data_ptr() if residual is not None else None,
        y.stride(0),
        x.num_rows,
        weight.num_columns,
        x.depth,
        weight.kind,
        _FINISHES[gated, activation],
    )


def read_all(threads: Threads, memory: Tensor) -> int:
    """Read the tensor once with the same threads: benchmarks measure the memory bandwidth with it."""
    total: int = library().octavo_read_all(threads.pointer, memory.data_ptr(), memory.nbytes)
    return total


def dot_rate(threads: Threads, num_dots: int = 1_200_000) -> float:
    """Operations per second of dot instructions on registers only, all threads together."""
    start = time.perf_counter()
    library().octavo_dot_all(threads.pointer, num_dots)
    return 2 * 64 * num_dots * threads.num_threads / (time.perf_counter() - start)


_HUGE_PAGE = 2 << 20
_ARENA_BYTES = 32 << 20
_arena_left: list[Tensor] = []  # the unused rest of the newest arena, if there is one


def _arena(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] for a weight. Small weights share an arena, so that they too lie on huge pages."""
    if num_bytes >= _ARENA_BYTES // 4:
        return aligned(num_bytes)
    taken = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    left = _arena_left.pop() if _arena_left else aligned(_ARENA_BYTES)
    if len(left) < taken:
        left = aligned(_ARENA_BYTES)
    _arena_left.append(left[taken:])
    return left[:num_bytes]


def aligned(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] aligned to a cache line; large tensors on huge pages if the system provides them."""
    if num_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # Private: shared mappings get huge pages only if the whole machine is configured for it.
        memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return _from(torch.frombuffer(memory, dtype=torch.uint8), _HUGE_PAGE, num_bytes)
    return _from(torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8), _ALIGNMENT, num_bytes)


def whole_pages(num_bytes: int) -> int:
    """Round `num_bytes` up to whole huge pages if that adds at most a sixth. The end of a smaller tensor lies on small pages, and reading
    it takes a look-up of an address every 4 KiB."""
    whole = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    return whole if hasattr(mmap, "MADV_HUGEPAGE") and 6 * (whole - num_bytes) <= num_bytes else num_bytes


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zero tensor whose memory is allocated when it is first written, on huge pages if it is large."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    return aligned(num_bytes).view(dtype).view(shape)


def _from(room: Tensor, alignment: int, num_bytes: int) -> Tensor:
    start = -room.data_ptr() % alignment
    return room[start : start + num_bytes]
