"""log Σ exp of each row of logits in float64, in the same order for any number of rows."""

import torch
import triton
import triton.language as tl

_TILE = 1024


@triton.jit
def _log_sum(logits, out, vocab_size, stride, TILE: tl.constexpr):
    """One program per row, in two passes: the maximum, then the sum."""
    row = logits + tl.program_id(0).to(tl.int64) * stride
    lane = tl.arange(0, TILE)
    largest = tl.full((TILE,), float("-inf"), tl.float32)
    for start in range(0, vocab_size, TILE):
        at = start + lane
        value = tl.load(row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        # The maximum may skip NaN, but the sum must not.
        largest = tl.maximum(largest, value)
    peak = tl.max(largest, 0)
    shift = tl.where((peak > float("-inf")) & (peak < float("inf")), peak, 0.0).to(tl.float64)
    total = tl.zeros((TILE,), tl.float64)
    for start in range(0, vocab_size, TILE):
        at = start + lane
        value = tl.load(row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float64)
        total += tl.exp(value - shift)
    tl.store(out + tl.program_id(0), tl.log(tl.sum(total, 0)) + shift)


def log_sum(logits: torch.Tensor) -> torch.Tensor:
    """log Σ exp over the last dimension: [P, V] → [P, 1] float64."""
    assert logits.stride(1) == 1
    out = torch.empty((logits.shape[0], 1), dtype=torch.float64, device=logits.device)
    if len(logits):
        _log_sum[(logits.shape[0],)](logits, out, logits.shape[1], logits.stride(0), TILE=_TILE, num_warps=4)
    return out
