"""Part of the drawing kernel: find the cutoff in a row's logits above which the tokens reach a given number or mass.

The searching program holds the largest logit of each chunk of its row, so that it reads only chunks that matter. Each pass
computes the mass above three values and so quarters the interval."""

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.sampling.records import UNIT_BITS as _UNIT_BITS

UNIT_BITS = tl.constexpr(_UNIT_BITS)
UNIT = tl.constexpr(2.0**_UNIT_BITS)
LARGEST_BITS = tl.constexpr(0x7F7FFFFF)  # of float32

# Keys are integers in the order of the logits' values, without the low bits of float32 that the logits' type lacks.
SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def largest_number(SHIFT: tl.constexpr):
    """The value that +inf counts as: the largest float32 with a key of its own."""
    return tl.full((), (LARGEST_BITS >> SHIFT) << SHIFT, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def mended(value, scale, SHIFT: tl.constexpr):
    """Replace NaN by -inf, and +inf by the largest number except in a greedy row, which distinguishes the two."""
    value = tl.where(value == value, value, float("-inf"))
    return tl.minimum(value, tl.where(scale > 0, largest_number(SHIFT), float("inf")))


@triton.jit
def mass_of(weight):
    return (weight * UNIT).to(tl.int64)


@triton.jit
def key_of(value, SHIFT: tl.constexpr):
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """The value of a key. Below zero the missing low bits count as ones, to keep the order of keys."""
    ordered = ((key << SHIFT) + tl.where(key < 0, (1 << SHIFT) - 1, 0)).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _probes(low, high, start, is_first, step, SHIFT: tl.constexpr):
    """Three ascending keys in (low, high], at the quarters from start to high; is_first: the first one at start instead."""
    width = high - start
    first, second, third = start + ((width + 3) >> 2), start + ((2 * width + 3) >> 2), start + ((3 * width + 3) >> 2)
    # Keys are dense around zero, logits are not: quartering values soon leaves few keys, unless the cut is close to zero.
    if (step < 3) & (width > 64):
        bottom, top = value_of(start, SHIFT), value_of(high, SHIFT)
        first = key_of(bottom * 0.75 + top * 0.25, SHIFT)
        second = key_of(bottom * 0.5 + top * 0.5, SHIFT)
        third = key_of(bottom * 0.25 + top * 0.75, SHIFT)
    first = tl.minimum(tl.maximum(tl.where(is_first, start, first), low + 1), high)
    second = tl.minimum(tl.maximum(second, first), high)
    third = tl.minimum(tl.maximum(third, second), high)
    return first, second, third


@triton.jit
def _reached(default, first, second, third, is_first, is_second, is_third):
    """The value for the highest probe that is reached. A probe is reached if the next higher one is."""
    return tl.where(is_third, third, tl.where(is_second, second, tl.where(is_first, first, default)))


@triton.jit
def _missed(default, first, second, third, is_first, is_second, is_third):
    """The highest key below the lowest probe that is not reached."""
    return tl.where(is_third, default, tl.where(is_second, third, tl.where(is_first, second, first)) - 1)


@triton.jit
def nth_largest(maxima, n, low, high, SHIFT: tl.constexpr):
    """A key in [low, high] that n of maxima [CHUNKS] reach, and few more if possible; low if few are above it anyway."""
    step = 0
    few = n + (n >> 2) + 4
    num_reaching = tl.sum((maxima >= value_of(low + 1, SHIFT)).to(tl.int64), 0)
    while (low < high) & (num_reaching > few):
        first, second, third = _probes(low, high, low, False, step, SHIFT)
        counts = (maxima >= value_of(first, SHIFT)).to(tl.int64)  # three counts in one sum
        counts += (maxima >= value_of(second, SHIFT)).to(tl.int64) << 20
        counts += (maxima >= value_of(third, SHIFT)).to(tl.int64) << 40
        count = tl.sum(counts, 0)
        of_first, of_second, of_third = count & 0xFFFFF, (count >> 20) & 0xFFFFF, count >> 40
        is_first, is_second, is_third = of_first >= n, of_second >= n, of_third >= n
        low = _reached(low, first, second, third, is_first, is_second, is_third)
        high = _missed(high, first, second, third, is_first, is_second, is_third)
        num_reaching = _reached(num_reaching, of_first, of_second, of_third, is_first, is_second, is_third)
        step += 1
    return low


@triton.jit
def _list(maxima, value, listed, CHUNKS: tl.constexpr):
    """List the chunks whose largest logit reaches the value, ascending. Returns their number."""
    is_listed = maxima >= value
    rank = tl.cumsum(is_listed.to(tl.int32), 0)
    tl.debug_barrier()  # all threads have read the previous list
    tl.store(listed + rank - 1, tl.arange(0, CHUNKS).to(tl.int64), mask=is_listed)
    tl.debug_barrier()
    return tl.max(rank, 0)


@triton.jit
def _read_listed(row, listed, position, num_listed, vocab_size, CHUNK: tl.constexpr):
    """Raw logits [GROUP, CHUNK] of the chunks at these positions of the list; -inf beyond its end."""
    chunk = tl.load(listed + position, mask=position < num_listed, other=0)
    at = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    mask = (position < num_listed)[:, None] & (at < vocab_size)
    return tl.load(row + at, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def search(
    row, listed, maxima, peak, scale, target, low, high, guess, vocab_size,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The highest key in (low, high] such that the tokens from it upwards have the mass `target`; low if there is none.

    With scale 0 every token has mass 1, so that a search for a number is a search for a mass. A guess above low, which may
    be wrong, is tried first: if it is reached, few chunks are read."""
    best = low
    step = 0
    while low < high:
        is_guess = (step == 0) & (guess > low)
        first, second, third = _probes(low, high, tl.where(is_guess, guess, low), is_guess, step, SHIFT)
        first_value, second_value, third_value = value_of(first, SHIFT), value_of(second, SHIFT), value_of(third, SHIFT)
        if SHIFT < 16:
            # In types with many values few tokens lie between the bounds: tighten the bounds to them, not only to the probes.
            low_value, high_value = value_of(low + 1, SHIFT), value_of(high, SHIFT)
            num_listed = _list(maxima, tl.where(is_guess, first_value, low_value), listed, CHUNKS)
        else:
            num_listed = _list(maxima, first_value, listed, CHUNKS)
        of_first, of_second = tl.zeros((GROUP,), tl.int64), tl.zeros((GROUP,), tl.int64)
        of_third = tl.zeros((GROUP,), tl.int64)
        least, most = tl.full((GROUP,), float("inf"), tl.float32), tl.full((GROUP,), float("-inf"), tl.float32)
        start = 0
        while start < num_listed:
            position = start + tl.arange(0, GROUP)
            value = _read_listed(row, listed, position, num_listed, vocab_size, CHUNK)  # NaN reaches nothing
            if SHIFT < 16:
                value = tl.where(value > largest_number(SHIFT), largest_number(SHIFT), value)
                least = tl.minimum(least, tl.min(tl.where(value >= low_value, value, float("inf")), 1))
                most = tl.maximum(most, tl.max(tl.where(value <= high_value, value, float("-inf")), 1))
            weight = tl.exp2((tl.minimum(value, peak) - peak) * scale)  # the peak is finite: +inf gets its weight
            of_first += mass_of(tl.sum(tl.where(value >= first_value, weight, 0.0), 1))
            of_second += mass_of(tl.sum(tl.where(value >= second_value, weight, 0.0), 1))
            of_third += mass_of(tl.sum(tl.where(value >= third_value, weight, 0.0), 1))
            start += GROUP
        is_first, is_second = tl.sum(of_first, 0) >= target, tl.sum(of_second, 0) >= target
        is_third = tl.sum(of_third, 0) >= target
        best = _reached(best, first, second, third, is_first, is_second, is_third)
        low = tl.maximum(low, best)
        high = _missed(high, first, second, third, is_first, is_second, is_third)
        if (SHIFT < 16) and not is_guess:
            low = tl.maximum(low, key_of(tl.min(least, 0) + 0.0, SHIFT) - 1)  # + 0.0 because -0 has another key than 0
            high = tl.minimum(high, key_of(tl.max(most, 0) + 0.0, SHIFT))
        step += 1
    return best


@triton.jit
def weigh(
    row, listed, maxima, peak, scale, cut, vocab_size,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """List the chunks that reach the cut, each with its mass above the cut and its number of tokens equal to it. Returns
    the number of chunks, the total mass above the cut and the total number of tokens above it."""
    num_listed = _list(maxima, cut, listed, CHUNKS)
    total = tl.zeros((GROUP,), tl.int64)
    count = tl.zeros((GROUP,), tl.int64)
    start = 0
    while start < num_listed:
        position = start + tl.arange(0, GROUP)
        value = mended(_read_listed(row, listed, position, num_listed, vocab_size, CHUNK), scale, SHIFT)
        mass = mass_of(tl.sum(tl.where(value > cut, tl.exp2((value - peak) * scale), 0.0), 1))
        equal = tl.sum((value == cut).to(tl.int32), 1).to(tl.int64)
        tl.store(listed + CHUNKS + position, mass, mask=position < num_listed)
        tl.store(listed + 2 * CHUNKS + position, equal, mask=position < num_listed)
        total += mass
        count += tl.sum((value > cut).to(tl.int32), 1)
        start += GROUP
    tl.debug_barrier()
    return num_listed, tl.sum(total, 0), tl.sum(count, 0)
