"""Parts of the drawing kernel: where a row's logits must be cut so that what is above reaches a number or a mass.
Knows nothing of temperatures, top-k or top-p: a target comes in, a value goes out.

The program that searches holds the largest logit of each chunk of its row, so that it reads only chunks that matter, and
it halves the interval twice a pass: each pass asks three values how much there is from them upwards."""

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.sampling.records import UNIT_BITS as _UNIT_BITS

UNIT_BITS = tl.constexpr(_UNIT_BITS)
UNIT = tl.constexpr(2.0**_UNIT_BITS)
LARGEST_BITS = tl.constexpr(0x7F7FFFFF)  # of float32

# Keys are whole numbers in the order of the logits' values, without the low bits of float32 that their type does not have.
SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def largest_number(SHIFT: tl.constexpr):
    """What +inf counts as: the largest float32 that has a key of its own."""
    return tl.full((), (LARGEST_BITS >> SHIFT) << SHIFT, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def mended(value, scale, SHIFT: tl.constexpr):
    """NaN is -inf; +inf is the largest number, but for a greedy row, which can tell the two apart."""
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
    """The number of that key. Below zero the bits that are not there count as ones, in the order of keys."""
    ordered = ((key << SHIFT) + tl.where(key < 0, (1 << SHIFT) - 1, 0)).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _probes(low, high, start, is_first, step, SHIFT: tl.constexpr):
    """Three keys in (low, high] in rising order, at the quarters from start to high; is_first: at start instead of one."""
    width = high - start
    first, second, third = start + ((width + 3) >> 2), start + ((2 * width + 3) >> 2), start + ((3 * width + 3) >> 2)
    # Keys crowd around zero, logits do not: quartering values soon leaves few keys, unless the cut is close to zero.
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
    """What belongs to the highest of the probes that is reached; each is if the next one is."""
    return tl.where(is_third, third, tl.where(is_second, second, tl.where(is_first, first, default)))


@triton.jit
def _missed(default, first, second, third, is_first, is_second, is_third):
    """The highest key below the lowest of the probes that is not reached."""
    return tl.where(is_third, default, tl.where(is_second, third, tl.where(is_first, second, first)) - 1)


@triton.jit
def nth_largest(maxima, n, low, high, SHIFT: tl.constexpr):
    """A key in [low, high] that n of maxima [CHUNKS] reach, and few more if it can be; low if few are above it anyway."""
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
    """Write the chunks whose largest reaches the value, in rising order; how many they are."""
    is_listed = maxima >= value
    rank = tl.cumsum(is_listed.to(tl.int32), 0)
    tl.debug_barrier()  # nobody reads the last list any more
    tl.store(listed + rank - 1, tl.arange(0, CHUNKS).to(tl.int64), mask=is_listed)
    tl.debug_barrier()
    return tl.max(rank, 0)


@triton.jit
def _read_listed(row, listed, position, num_listed, vocab_size, CHUNK: tl.constexpr):
    """Logits [GROUP, CHUNK] as they are of the chunks at these positions of the list; -inf beyond its end."""
    chunk = tl.load(listed + position, mask=position < num_listed, other=0)
    at = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    mask = (position < num_listed)[:, None] & (at < vocab_size)
    return tl.load(row + at, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def search(
    row, listed, maxima, peak, scale, target, low, high, guess, vocab_size,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The highest key in (low, high] from which upwards the tokens weigh `target`; low if there is none.

    With a scale of 0 every token weighs 1, so that a search for a number is one for a mass. A guess above low, which need
    not be right, is asked first: few chunks are read if they reach it."""
    best = low
    step = 0
    while low < high:
        is_guess = (step == 0) & (guess > low)
        first, second, third = _probes(low, high, tl.where(is_guess, guess, low), is_guess, step, SHIFT)
        first_value, second_value, third_value = value_of(first, SHIFT), value_of(second, SHIFT), value_of(third, SHIFT)
        if SHIFT < 16:
            # Types with many numbers have few tokens in between: the bounds follow these, not only the probes.
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
            weight = tl.exp2((tl.minimum(value, peak) - peak) * scale)  # the peak is finite: +inf weighs no more
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
            low = tl.maximum(low, key_of(tl.min(least, 0) + 0.0, SHIFT) - 1)  # adding 0: -0 has a key of its own
            high = tl.minimum(high, key_of(tl.max(most, 0) + 0.0, SHIFT))
        step += 1
    return best


@triton.jit
def weigh(
    row, listed, maxima, peak, scale, cut, vocab_size,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """List the chunks that reach the cut, each with the mass above it and the number of tokens equal to it.
    Returns how many chunks, and of all of them together: that mass, the number of tokens above the cut."""
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
