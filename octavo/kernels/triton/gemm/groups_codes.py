"""What the kernels of weights in groups share: codes made numbers, and scales in one step or two."""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

OUTER = tl.constexpr(256)  # weights that share an outer scale


@triton.jit  # type: ignore[untyped-decorator]
def as_number(codes, ZERO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes less the zero, float32. Integers below 2 ** 23 are the last bits of a float between 2 ** 23 and 2 ** 24: that takes two
    instructions of the full rate, where a conversion takes one of a quarter of it."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.int32) | 0x4B000000
        return bits.to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
    elif codes.dtype == tl.int8:
        bits = (codes.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.int32) | 0x4B000000
        return bits.to(tl.float32, bitcast=True) - (8388736.0 + ZERO)
    else:
        return codes.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def load_steps(values, outer, row, group, is_there, GROUPS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """values [N, GROUPS] at row and group, which broadcast against each other, each times its outer number if there are some:
    float32, 0 where `is_there` is false."""
    found = tl.load(values + row * GROUPS + group, mask=is_there, other=0).to(tl.float32)
    if outer is not None:
        large = tl.load(outer + row * (GROUPS * GROUP // OUTER) + group * GROUP // OUTER, mask=is_there, other=0.0)
        found *= large.to(tl.float32)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def load_codes(place, is_there, EVICT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes, 0 where `is_there` is false."""
    if place.dtype.element_ty.is_int():
        return tl.load(place, mask=is_there, other=0, eviction_policy=EVICT)
    else:
        return tl.load(place, mask=is_there, other=0.0, eviction_policy=EVICT)
