"""Draw one token per row by inverse CDF in vocabulary order, from the tokens that min-p, top-k and top-p keep, without
sorting. Parameters come in one record per row (records.py).

Two launches. _survey reads every logit once and writes, for each chunk of 256, the largest logit and, if needed, the weight.
_choose, one program per row, works on these: it draws a chunk, then a token of the chunk. Filters are cutoffs in value: the
program searches the value from which upwards the tokens reach top_k in number, or top_p in mass. Of the tokens equal to the
cutoff, the lowest ids are kept."""

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.sampling import records as columns

_CHUNK = 256  # logits of one warp: one 16-byte load per lane for bfloat16
_SURVEY_GROUP = 16  # chunks per program of _survey
_SURVEY_WARPS = 4
_GROUP = 32  # chunks that a program of _choose reads together
_NUM_WARPS = 16
_MAX_REGISTERS = None
MAX_VOCAB_SIZE = 2**20  # so that sums of masses fit into int64

SOURCE = tl.constexpr(columns.SOURCE)
TARGET = tl.constexpr(columns.TARGET)
SCALE = tl.constexpr(columns.SCALE)
REACH = tl.constexpr(columns.REACH)
TOP_K = tl.constexpr(columns.TOP_K)
TOP_P = tl.constexpr(columns.TOP_P)
FILTERED = tl.constexpr(columns.FILTERED)
UNIFORM = tl.constexpr(columns.UNIFORM)
WIDTH = tl.constexpr(columns.WIDTH)
EVERY = tl.constexpr(2**40)  # more tokens than a row has

UNIT_BITS = tl.constexpr(columns.UNIT_BITS)
UNIT = tl.constexpr(2.0**columns.UNIT_BITS)
LARGEST_BITS = tl.constexpr(0x7F7FFFFF)  # of float32

# Keys are integers in the order of the logits' values, without the low bits of float32 that the logits' type lacks.
_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


# ── values, keys and masses ──


@triton.jit
def _largest_number(SHIFT: tl.constexpr):
    """The value that +inf counts as: the largest float32 with a key of its own."""
    return tl.full((), (LARGEST_BITS >> SHIFT) << SHIFT, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _mended(value, scale, SHIFT: tl.constexpr):
    """Replace NaN by -inf, and +inf by the largest number except in a greedy row, which distinguishes the two."""
    value = tl.where(value == value, value, float("-inf"))
    return tl.minimum(value, tl.where(scale > 0, _largest_number(SHIFT), float("inf")))


@triton.jit
def _mass_of(weight):
    return (weight * UNIT).to(tl.int64)


@triton.jit
def _key_of(value, SHIFT: tl.constexpr):
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


@triton.jit
def _value_of(key, SHIFT: tl.constexpr):
    """The value of a key. Below zero the missing low bits count as ones, to keep the order of keys."""
    ordered = ((key << SHIFT) + tl.where(key < 0, (1 << SHIFT) - 1, 0)).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# ── the search for a cutoff ──
#
# The program holds the largest logit of each chunk of its row, so that it reads only chunks that matter. Each pass computes
# the mass above three values and so quarters the interval.


@triton.jit
def _probes(low, high, start, is_first, step, SHIFT: tl.constexpr):
    """Three ascending keys in (low, high], at the quarters from start to high; is_first: the first one at start instead."""
    width = high - start
    first, second, third = start + ((width + 3) >> 2), start + ((2 * width + 3) >> 2), start + ((3 * width + 3) >> 2)
    # Keys are dense around zero, logits are not: quartering values soon leaves few keys, unless the cut is close to zero.
    if (step < 3) & (width > 64):
        bottom, top = _value_of(start, SHIFT), _value_of(high, SHIFT)
        first = _key_of(bottom * 0.75 + top * 0.25, SHIFT)
        second = _key_of(bottom * 0.5 + top * 0.5, SHIFT)
        third = _key_of(bottom * 0.25 + top * 0.75, SHIFT)
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
def _nth_largest(maxima, n, low, high, SHIFT: tl.constexpr):
    """A key in [low, high] that n of maxima [CHUNKS] reach, and few more if possible; low if few are above it anyway."""
    step = 0
    few = n + (n >> 2) + 4
    num_reaching = tl.sum((maxima >= _value_of(low + 1, SHIFT)).to(tl.int64), 0)
    while (low < high) & (num_reaching > few):
        first, second, third = _probes(low, high, low, False, step, SHIFT)
        counts = (maxima >= _value_of(first, SHIFT)).to(tl.int64)  # three counts in one sum
        counts += (maxima >= _value_of(second, SHIFT)).to(tl.int64) << 20
        counts += (maxima >= _value_of(third, SHIFT)).to(tl.int64) << 40
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
def _search(
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
        first_value, second_value, third_value = (
            _value_of(first, SHIFT),
            _value_of(second, SHIFT),
            _value_of(third, SHIFT),
        )
        if SHIFT < 16:
            # In types with many values few tokens lie between the bounds: tighten the bounds to them, not only to the probes.
            low_value, high_value = _value_of(low + 1, SHIFT), _value_of(high, SHIFT)
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
                value = tl.where(value > _largest_number(SHIFT), _largest_number(SHIFT), value)
                least = tl.minimum(least, tl.min(tl.where(value >= low_value, value, float("inf")), 1))
                most = tl.maximum(most, tl.max(tl.where(value <= high_value, value, float("-inf")), 1))
            weight = tl.exp2((tl.minimum(value, peak) - peak) * scale)  # the peak is finite: +inf gets its weight
            of_first += _mass_of(tl.sum(tl.where(value >= first_value, weight, 0.0), 1))
            of_second += _mass_of(tl.sum(tl.where(value >= second_value, weight, 0.0), 1))
            of_third += _mass_of(tl.sum(tl.where(value >= third_value, weight, 0.0), 1))
            start += GROUP
        is_first, is_second = tl.sum(of_first, 0) >= target, tl.sum(of_second, 0) >= target
        is_third = tl.sum(of_third, 0) >= target
        best = _reached(best, first, second, third, is_first, is_second, is_third)
        low = tl.maximum(low, best)
        high = _missed(high, first, second, third, is_first, is_second, is_third)
        if (SHIFT < 16) and not is_guess:
            low = tl.maximum(low, _key_of(tl.min(least, 0) + 0.0, SHIFT) - 1)  # + 0.0 because -0 has another key than 0
            high = tl.minimum(high, _key_of(tl.max(most, 0) + 0.0, SHIFT))
        step += 1
    return best


@triton.jit
def _weigh(
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
        value = _mended(_read_listed(row, listed, position, num_listed, vocab_size, CHUNK), scale, SHIFT)
        mass = _mass_of(tl.sum(tl.where(value > cut, tl.exp2((value - peak) * scale), 0.0), 1))
        equal = tl.sum((value == cut).to(tl.int32), 1).to(tl.int64)
        tl.store(listed + CHUNKS + position, mass, mask=position < num_listed)
        tl.store(listed + 2 * CHUNKS + position, equal, mask=position < num_listed)
        total += mass
        count += tl.sum((value > cut).to(tl.int32), 1)
        start += GROUP
    tl.debug_barrier()
    return num_listed, tl.sum(total, 0), tl.sum(count, 0)


# ── the two launches ──


@triton.jit
def _read(row, at, vocab_size, scale, SHIFT: tl.constexpr):
    return _mended(tl.load(row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32), scale, SHIFT)


@triton.jit
def _survey(
    logits,  # [?, V], rows `stride` apart
    records,  # [R, WIDTH]
    found,  # [R, 2, CHUNKS] float32: each chunk's largest logit; its weight, relative to its largest token
    vocab_size,
    stride,
    found_stride,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
):
    record = records + tl.program_id(1) * WIDTH
    scale = tl.load(record + SCALE).to(tl.float32)
    chunk = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    at = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    row = logits + tl.load(record + SOURCE).to(tl.int64) * stride
    value = _read(row, at, vocab_size, scale, SHIFT)
    largest = tl.max(value, 1)
    place = found + tl.program_id(1).to(tl.int64) * found_stride + chunk
    tl.store(place, largest, mask=chunk < CHUNKS)
    if (scale > 0) & (tl.load(record + FILTERED) == 0):
        top = tl.where(largest > float("-inf"), largest, 0.0)
        weight = tl.sum(tl.exp2((value - top[:, None]) * scale), 1)
        tl.store(place + CHUNKS, weight, mask=chunk < CHUNKS)


@triton.jit
def _part_of(total, share):
    """The smallest mass that is at least `share` of the total."""
    exact = total.to(tl.float64) * share
    rounded = exact.to(tl.int64)
    return tl.maximum(rounded + (rounded.to(tl.float64) < exact).to(tl.int64), 1)


@triton.jit
def _sure_of(total, top_p, num_tokens, peak, scale, SHIFT: tl.constexpr):
    """A key such that the tokens from it upwards surely have top_p of the total. Tokens lighter than w have together less than
    w times their number; w is chosen so that this is half of what top_p leaves over, so rounding does not matter."""
    spare = 0.5 * ((1.0 - top_p) * total.to(tl.float64)).to(tl.float32) / UNIT
    return _key_of(peak + tl.log2(spare / num_tokens) / scale, SHIFT)


@triton.jit
def _filter(
    row, listed, maxima, peak, scale, reach, top_k, top_p, is_filtered, total, vocab_size,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Find the cutoff. Returns it, the number of kept tokens that equal it, and the number of listed chunks, which reach
    it. Tokens above the cutoff are kept."""
    cut = peak - reach
    num_equal = tl.full((), EVERY, tl.int64)
    # The search covers keys above `low`: if the lowest value is exact as a key, that key is still allowed.
    low = _key_of(cut, SHIFT) - (_value_of(_key_of(cut, SHIFT), SHIFT) >= cut).to(tl.int64)
    high = _key_of(peak, SHIFT)
    num_listed, above, count = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    stage = 0
    while stage < 2:  # first by number: top_k of what min-p left; then by mass: top_p of what top_k left
        is_mass = stage == 1
        is_asked = tl.where(is_mass, top_p < 1.0, top_k < vocab_size)
        target = tl.where(is_mass, _part_of(total, top_p), top_k << UNIT_BITS)
        found = low
        if is_asked:
            if is_mass:
                low = tl.maximum(low, _sure_of(total, top_p, top_k, peak, scale, SHIFT) - 1)
            # n chunks, and so at least n tokens, reach the n-th largest of the maxima: a sure bound for a number. For a mass
            # it is a guess that costs reading one group; most rows of a language model need no more.
            guess = _nth_largest(maxima, tl.where(is_mass, GROUP, top_k), low, high, SHIFT)
            found = _search(
                row, listed, maxima, peak, tl.where(is_mass, scale, 0.0), target, low, high, guess, vocab_size,
                CHUNKS, CHUNK, GROUP, SHIFT,
            )  # fmt: skip
        is_found = found > low
        cut = tl.where(is_found, _value_of(found, SHIFT), cut)
        low = tl.maximum(low, found)
        if is_asked | (is_filtered & (stage == 0)):  # also if nothing was found: the search has overwritten the list
            num_listed, above, count = _weigh(
                row, listed, maxima, peak, scale, cut, vocab_size, CHUNKS, CHUNK, GROUP, SHIFT
            )
        unit = tl.maximum(_mass_of(tl.exp2((cut - peak) * scale)), 1)
        if is_mass:
            fitting = tl.maximum((target - above + unit - 1) // unit, 1)  # the token that crosses top_p is kept
            fitting = tl.where(is_found, fitting, tl.minimum(num_equal, fitting))
            num_equal = tl.where(is_asked, fitting, num_equal)
        elif is_filtered:
            num_equal = tl.where(is_found, top_k - count, num_equal)
            index = tl.arange(0, CHUNKS)
            equal = tl.load(listed + 2 * CHUNKS + index, mask=index < num_listed, other=0)
            total = above + tl.minimum(num_equal, tl.sum(equal, 0)) * unit
        stage += 1
    return cut, num_equal, num_listed


@triton.jit
def _token_of_chunk(
    row, chunk, cut, num_equal, threshold, mass, vocab_size, scale, CHUNK: tl.constexpr, SHIFT: tl.constexpr
):
    """The token at which the cumulative mass of the chunk's kept tokens exceeds the threshold, a part of `mass`."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    value = _read(row, at, vocab_size, scale, SHIFT)
    is_equal = (value == cut).to(tl.int32)
    is_kept = (value > cut) | ((is_equal == 1) & (tl.cumsum(is_equal, 0) <= num_equal))
    # Relative to the chunk's own largest, so that the masses never all round to 0.
    weight = tl.where(is_kept, _mass_of(tl.exp2((value - tl.max(value, 0)) * scale)), 0)
    total = tl.sum(weight, 0)
    within = (threshold.to(tl.float64) / mass.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    below = tl.cumsum(weight, 0) <= tl.minimum(within, total - 1)
    return chunk * CHUNK + tl.sum(below.to(tl.int64), 0)


@triton.jit
def _draw(
    row, record, listed, maxima, weights, peak, scale, vocab_size,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, CHUNKS)
    is_filtered = tl.load(record + FILTERED) > 0
    top_p = tl.load(record + TOP_P)
    mass = _mass_of(weights * tl.exp2((maxima - peak) * scale))  # [CHUNKS]
    equal = tl.zeros((CHUNKS,), tl.int64)  # per chunk: kept tokens that equal the cut
    cut = float("-inf")
    is_cut = is_filtered | (top_p < 1.0)
    if is_cut:
        top_k, reach = tl.load(record + TOP_K).to(tl.int64), tl.load(record + REACH).to(tl.float32)
        cut, num_equal, num_listed = _filter(
            row, listed, maxima, peak, scale, reach, top_k, top_p, is_filtered, tl.sum(mass, 0), vocab_size,
            CHUNKS, CHUNK, GROUP, SHIFT,
        )  # fmt: skip
        equal = tl.load(listed + 2 * CHUNKS + index, mask=index < num_listed, other=0)
        equal = tl.minimum(tl.maximum(num_equal - (tl.cumsum(equal, 0) - equal), 0), equal)
        mass = tl.load(listed + CHUNKS + index, mask=index < num_listed, other=0)
        mass += equal * tl.maximum(_mass_of(tl.exp2((cut - peak) * scale)), 1)
    total = tl.sum(mass, 0)
    threshold = (tl.load(record + UNIFORM) * total.to(tl.float64)).to(tl.int64)
    threshold = tl.minimum(threshold, total - 1)
    place = tl.sum((tl.cumsum(mass, 0) <= threshold).to(tl.int64), 0)
    before = tl.sum(tl.where(index < place, mass, 0), 0)
    is_here = index == place
    chunk = place
    if is_cut:
        chunk = tl.load(listed + place)
    return _token_of_chunk(
        row, chunk, cut, tl.sum(tl.where(is_here, equal, 0), 0), threshold - before,
        tl.sum(tl.where(is_here, mass, 0), 0), vocab_size, scale, CHUNK, SHIFT,
    )  # fmt: skip


@triton.jit
def _choose(
    logits,  # [?, V], rows `stride` apart
    records,  # [R, WIDTH]
    found,  # [R, 2, CHUNKS] float32 from _survey
    listed,  # [R, 3, CHUNKS] int64: listed chunks; for each the mass above the cut, and the number of tokens equal to it
    out,  # [?] int64
    vocab_size,
    stride,
    found_stride,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    record = records + program * WIDTH
    scale = tl.load(record + SCALE).to(tl.float32)
    row = logits + tl.load(record + SOURCE).to(tl.int64) * stride
    found += program * found_stride
    index = tl.arange(0, CHUNKS)
    maxima = tl.load(found + index, mask=index * CHUNK < vocab_size, other=float("-inf"))
    peak = tl.max(maxima, 0) + 0.0  # never -0, which has another key than 0
    token = tl.full((), 0, tl.int64)
    if peak > float("-inf"):
        if scale > 0:
            num_weighed = tl.where(tl.load(record + FILTERED) > 0, 0, vocab_size)
            weights = tl.load(found + CHUNKS + index, mask=index * CHUNK < num_weighed, other=0.0)
            token = _draw(
                row, record, listed + program * (found_stride // 2), maxima, weights, peak, scale, vocab_size,
                CHUNKS, CHUNK, GROUP, SHIFT,
            )  # fmt: skip
        else:
            chunk = tl.min(tl.where(maxima == peak, index, CHUNKS), 0)
            at = chunk * CHUNK + tl.arange(0, CHUNK)
            is_peak = _read(row, at, vocab_size, scale, SHIFT) == peak
            token = tl.min(tl.where(is_peak, at, vocab_size), 0).to(tl.int64)
    tl.store(out + tl.load(record + TARGET).to(tl.int64), token)


def draw(
    logits: torch.Tensor,
    records: torch.Tensor,
    out: torch.Tensor,
    *,
    group: int = _GROUP,
    num_warps: int = _NUM_WARPS,
    max_registers: int | None = _MAX_REGISTERS,
) -> None:
    """For each record [R, WIDTH] float64, draw a token from its row of logits [?, V] into its place of out [?] int64.

    The same logits and record give the same token in any batch. Can be captured in a CUDA graph."""
    num_rows, vocab_size = len(records), logits.shape[1]
    assert logits.stride(1) == 1 and out.stride(0) == 1 and out.dtype == torch.int64
    assert records.is_contiguous() and records.dtype == torch.float64 and records.shape[1] == columns.WIDTH
    assert vocab_size <= MAX_VOCAB_SIZE
    if not num_rows:
        return
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    chunks = max(group, triton.next_power_of_2(num_chunks))
    # Per row: `found`, 2 · CHUNKS float32, and `listed`, 3 · CHUNKS int64.
    space = torch.empty((num_rows, 4 * chunks), dtype=torch.int64, device=logits.device)
    found, listed = space.view(torch.float32), space.view(-1)[chunks:]
    _survey[(triton.cdiv(num_chunks, _SURVEY_GROUP), num_rows)](
        logits, records, found, vocab_size, logits.stride(0), 8 * chunks,
        CHUNKS=chunks, CHUNK=_CHUNK, GROUP=_SURVEY_GROUP, SHIFT=_SHIFTS[logits.dtype], num_warps=_SURVEY_WARPS,
    )  # fmt: skip
    _choose[(num_rows,)](
        logits, records, found, listed, out, vocab_size, logits.stride(0), 8 * chunks,
        CHUNKS=chunks, CHUNK=_CHUNK, GROUP=group, SHIFT=_SHIFTS[logits.dtype], num_warps=num_warps, maxnreg=max_registers,
    )  # fmt: skip
