"""Merge partial attention outputs, weighted by their log2-sum-exp."""

import triton
import triton.language as tl


@triton.jit
def fold(acc, largest, total, part, part_lse):  # type: ignore[no-untyped-def]
    """Fold one more part [M, D] with lse [M] into a running softmax: weighted values, largest exponent, sum of powers."""
    higher = tl.maximum(largest, part_lse)
    keep = tl.exp2(largest - higher)
    add = tl.exp2(part_lse - higher)
    return acc * keep[:, None] + part * add[:, None], higher, total * keep + add


@triton.jit
def with_sinks(largest, total, sinks, is_head):  # type: ignore[no-untyped-def]
    """Add each head's sink, which has no value, to the sum of powers [M] relative to the largest exponent. A sink far above
    all keys makes the sum infinite and the output 0."""
    LOG2E: tl.constexpr = 1.4426950408889634
    return total + tl.exp2(tl.load(sinks, mask=is_head, other=0.0) * LOG2E - largest)


@triton.jit
def join(  # type: ignore[no-untyped-def]
    partial_out,  # [items, H, D] float32, each normalised
    partial_lse,  # [items, H] float32, log2
    first,  # the row's parts are first … first + count − 1
    count,
    out,  # points to the output of head first_head
    sinks,  # [H] float32 or None
    first_head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PARTS: tl.constexpr,  # parts loaded together, so that their latencies overlap
):
    """Write the outputs of GROUP heads of one row from its parts."""
    GROUP_PADDED: tl.constexpr = triton.next_power_of_2(GROUP)
    group = tl.arange(0, GROUP_PADDED)
    heads = first_head + tl.minimum(group, GROUP - 1)  # heads beyond the group repeat the last one and are not stored
    dims = tl.arange(0, D_PADDED)
    largest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, D_PADDED], tl.float32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        place = (first + part)[None, :] * NUM_HEADS + heads[:, None]  # [GROUP, PARTS]
        is_part = (part < count)[None, :]
        mask = is_part[:, :, None] & (dims < D)[None, None, :]
        # .cg bypasses the L1 cache: other programs wrote these during this launch.
        lse = tl.load(partial_lse + place, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        block = tl.load(
            partial_out + place[:, :, None] * D + dims[None, None, :], mask=mask, other=0.0, cache_modifier=".cg"
        )
        higher = tl.maximum(largest, tl.max(lse, axis=1))
        keep = tl.exp2(largest - higher)
        weights = tl.exp2(lse - higher[:, None])
        acc = acc * keep[:, None] + tl.sum(block * weights[:, :, None], axis=1)
        total = total * keep + tl.sum(weights, axis=1)
        largest = higher
    if sinks is not None:
        total = with_sinks(largest, total, sinks + heads, group < GROUP)
    place = group[:, None] * D + dims[None, :]
    mask = (group < GROUP)[:, None] & (dims < D)[None, :]
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
