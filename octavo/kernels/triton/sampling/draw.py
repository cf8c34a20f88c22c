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
from octavo.kernels.triton.sampling.cutoff_search import (
    SHIFTS,
    UNIT,
    UNIT_BITS,
    key_of,
    mass_of,
    mended,
    nth_largest,
    search,
    value_of,
    weigh,
)

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


@triton.jit
def _read(row, at, vocab_size, scale, SHIFT: tl.constexpr):
    return mended(tl.load(row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32), scale, SHIFT)


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
    whole = exact.to(tl.int64)
    return tl.maximum(whole + (whole.to(tl.float64) < exact).to(tl.int64), 1)


@triton.jit
def _sure_of(total, top_p, num_tokens, peak, scale, SHIFT: tl.constexpr):
    """A key such that the tokens from it upwards surely have top_p of the total. Tokens lighter than w have together less than
    w times their number; w is chosen so that this is half of what top_p leaves over, so rounding does not matter."""
    spare = 0.5 * ((1.0 - top_p) * total.to(tl.float64)).to(tl.float32) / UNIT
    return key_of(peak + tl.log2(spare / num_tokens) / scale, SHIFT)


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
    low = key_of(cut, SHIFT) - (value_of(key_of(cut, SHIFT), SHIFT) >= cut).to(tl.int64)
    high = key_of(peak, SHIFT)
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
            guess = nth_largest(maxima, tl.where(is_mass, GROUP, top_k), low, high, SHIFT)
            found = search(
                row, listed, maxima, peak, tl.where(is_mass, scale, 0.0), target, low, high, guess, vocab_size,
                CHUNKS, CHUNK, GROUP, SHIFT,
            )  # fmt: skip
        is_found = found > low
        cut = tl.where(is_found, value_of(found, SHIFT), cut)
        low = tl.maximum(low, found)
        if is_asked | (is_filtered & (stage == 0)):  # also if nothing was found: the search has overwritten the list
            num_listed, above, count = weigh(
                row, listed, maxima, peak, scale, cut, vocab_size, CHUNKS, CHUNK, GROUP, SHIFT
            )
        unit = tl.maximum(mass_of(tl.exp2((cut - peak) * scale)), 1)
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
    weight = tl.where(is_kept, mass_of(tl.exp2((value - tl.max(value, 0)) * scale)), 0)
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
    mass = mass_of(weights * tl.exp2((maxima - peak) * scale))  # [CHUNKS]
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
        mass += equal * tl.maximum(mass_of(tl.exp2((cut - peak) * scale)), 1)
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
        CHUNKS=chunks, CHUNK=_CHUNK, GROUP=_SURVEY_GROUP, SHIFT=SHIFTS[logits.dtype], num_warps=_SURVEY_WARPS,
    )  # fmt: skip
    _choose[(num_rows,)](
        logits, records, found, listed, out, vocab_size, logits.stride(0), 8 * chunks,
        CHUNKS=chunks, CHUNK=_CHUNK, GROUP=group, SHIFT=SHIFTS[logits.dtype], num_warps=num_warps, maxnreg=max_registers,
    )  # fmt: skip
