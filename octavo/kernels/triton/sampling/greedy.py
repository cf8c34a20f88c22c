"""The likeliest token of each row of logits in one launch, with as many programs per row as keep the GPU busy."""

import torch
import triton
import triton.language as tl

_TILE = 4096  # logits that a program reads together: four 16-byte loads per thread for bfloat16
_NUM_WARPS = 4
_NUM_PROGRAMS = 528  # four for each of 132 multiprocessors; with fewer rows, rows are split
_counters: dict[torch.device, torch.Tensor] = {}


@triton.jit
def _ordered(value):
    """float32 without NaN → int32 in the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["tiles"])
def _argmax(
    logits,  # [S, V], rows `stride` apart
    partial,  # [S, P] int64: each program's largest logit and its id, as one number
    counters,  # [S or more] int32: finished programs of the row; 0 before and after the launch
    out,  # [S] int64
    vocab_size,
    stride,
    tiles,  # of the row per program
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
        # Comparisons with NaN are false, so NaN is never taken.
        value = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocab_size, other=float("-inf"))
        is_larger = value.to(tl.float32) > best
        best = tl.where(is_larger, value.to(tl.float32), best)
        best_at = tl.where(is_larger, at, best_at)
        tile += 1
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, best_at, 0x7FFFFFFF), 0)
    if SPLIT:
        # Larger logits have larger keys; of equal logits the lower id has. Adding 0 turns -0 into 0.
        key = (_ordered(largest + 0.0).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
        num_parts = tl.num_programs(0)
        tl.store(partial + row * num_parts + part, key)
        tl.debug_barrier()
        # The last program to finish sees the others' results, and resets the counter.
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
    """Ids [S] int64 of the largest of logits [S, V]; of equal ones the lowest; NaN counts as -inf; 0 if none is above -inf.

    Can be captured in a CUDA graph once it has run outside of one. Only one stream of a device may use it at a time."""
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
    tiles = triton.cdiv(num_tiles, max(1, num_programs // num_rows))  # per program: whole tiles, so that parts are even
    num_parts = triton.cdiv(num_tiles, tiles)
    partial = torch.empty(num_rows * num_parts, dtype=torch.int64, device=logits.device) if num_parts > 1 else out
    _argmax[(num_parts, num_rows)](
        logits, partial, _counters_on(logits.device), out, vocab_size, logits.stride(0), tiles,
        TILE=tile, SPLIT=num_parts > 1, MAX_PARTS=triton.next_power_of_2(num_tiles), num_warps=num_warps,
    )  # fmt: skip


def _counters_on(device: torch.device) -> torch.Tensor:
    """A counter for every row that can be split. The kernel resets them to zero, so they are filled once."""
    counters = _counters.get(device)
    if counters is None:
        # A capture does not run the fill, so the counters would not be zero for other callers.
        assert not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()), (
            "run argmax before capturing it"
        )
        counters = _counters[device] = torch.zeros(_NUM_PROGRAMS, dtype=torch.int32, device=device)
    return counters
