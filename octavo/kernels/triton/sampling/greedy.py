"""The likeliest token of each row of logits, in one launch, by as many programs a row as keep the GPU busy.
Knows nothing of temperatures or filters: those are in sampling_draw."""

import torch
import triton
import triton.language as tl

_TILE = 4096  # logits a program looks at together: four 16-byte loads a thread of bfloat16
_NUM_WARPS = 4
_NUM_PROGRAMS = 528  # four for each of 132 multiprocessors; fewer rows than that are split
_counters: dict[torch.device, torch.Tensor] = {}


@triton.jit
def _ordered(value):
    """float32 → int32 of the same order; no NaN."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["tiles"])
def _argmax(
    logits,  # [S, V], rows `stride` apart
    partial,  # [S, P] int64: each program's largest logit and its id, as one number
    counters,  # [S or more] int32, 0: programs of the row that are done
    out,  # [S] int64
    vocab_size,
    stride,
    tiles,  # a program's share of the row
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,  # whether P > 1
    MAX_PARTS: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, TILE)
    first = part * tiles * TILE
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_at = first + lane
    tile = 0
    while tile < tiles:
        at = first + tile * TILE + lane
        # NaN is not larger than anything, so it is never taken.
        value = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocab_size, other=float("-inf"))
        is_larger = value.to(tl.float32) > best
        best = tl.where(is_larger, value.to(tl.float32), best)
        best_at = tl.where(is_larger, at, best_at)
        tile += 1
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, best_at, 0x7FFFFFFF), 0)
    if SPLIT:
        # The larger logit, then the lower id, is the larger number. Adding 0 makes -0 the equal of 0, as it is.
        key = (_ordered(largest + 0.0).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
        num_parts = tl.num_programs(0)
        tl.store(partial + row * num_parts + part, key)
        tl.debug_barrier()
        # Whoever finishes last sees what all others wrote, and leaves the counter as it was found.
        if tl.atomic_add(counters + row, 1, sem="acq_rel") == num_parts - 1:
            index = tl.arange(0, MAX_PARTS)
            keys = tl.load(
                partial + row * num_parts + index, mask=index < num_parts, other=-(2**63), cache_modifier=".cg"
            )
            tl.store(out + row, 0x7FFFFFFF - (tl.max(keys, 0) & 0x7FFFFFFF))
            tl.store(counters + row, 0)
    else:
        tl.store(out + row, token.to(tl.int64))


def argmax(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Ids [S] int64 of the largest of logits [S, V]; the lowest of equals; NaN counts as -inf; 0 if nothing is above -inf.

    Can be captured in a CUDA graph once it has run outside of one. One stream of a device at a time may be at it."""
    num_rows = logits.shape[0]
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1 and out.shape == (num_rows,) and out.stride(0) == 1 and out.dtype == torch.int64
    if num_rows:
        _launch_argmax(logits, out, _TILE, _NUM_WARPS, _NUM_PROGRAMS)
    return out


def _launch_argmax(logits: torch.Tensor, out: torch.Tensor, tile: int, num_warps: int, num_programs: int) -> None:
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, tile)
    tiles = triton.cdiv(num_tiles, max(1, num_programs // num_rows))  # whole tiles each, so that parts are even
    num_parts = triton.cdiv(num_tiles, tiles)
    partial = torch.empty(num_rows * num_parts, dtype=torch.int64, device=logits.device) if num_parts > 1 else out
    _argmax[(num_parts, num_rows)](
        logits, partial, _counters_on(logits.device), out, vocab_size, logits.stride(0), tiles,
        TILE=tile, SPLIT=num_parts > 1, MAX_PARTS=triton.next_power_of_2(num_tiles), num_warps=num_warps,
    )  # fmt: skip


def _counters_on(device: torch.device) -> torch.Tensor:
    """Zeros for every row that can be split: the kernel leaves them zero, so they are filled once."""
    counters = _counters.get(device)
    if counters is None:
        # In a capture nothing runs yet, so the zeros would not be there for anybody else.
        assert not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()), (
            "run argmax before capturing it"
        )
        counters = _counters[device] = torch.zeros(_NUM_PROGRAMS, dtype=torch.int32, device=device)
    return counters
