"""Changes to logits before a token is chosen: grammar masks, penalties for tokens that a row contains, and bans of stop ids."""

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.sampling import records as columns

_MASK_BLOCK = 4096  # logits that a program masks
_WORD = 32  # tokens per word of a mask
_WIDE_BLOCK = 4096  # logits that a program converts to float32
_BLOCK = 1024  # tokens that a program penalises

PENALTY_ROW = tl.constexpr(columns.PENALTY_ROW)
PENALTY_SOURCE = tl.constexpr(columns.PENALTY_SOURCE)
PROMPT_LEN = tl.constexpr(columns.PROMPT_LEN)
LENGTH = tl.constexpr(columns.LENGTH)
REPETITION = tl.constexpr(columns.REPETITION)
FREQUENCY = tl.constexpr(columns.FREQUENCY)
PRESENCE = tl.constexpr(columns.PRESENCE)
WIDTH = tl.constexpr(columns.WIDTH)
PROMPT = tl.constexpr(0)
OUTPUT = tl.constexpr(1)
EVERY_OUTPUT = tl.constexpr(2)


@triton.jit
def _mask(logits, bits, at, vocab_size, stride, num_words, unlikeliest, BLOCK: tl.constexpr):
    number = tl.program_id(1).to(tl.int64)
    row = logits + tl.load(at + number) * stride
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(bits + number * num_words + token // 32, mask=inside, other=0)
    value = tl.load(row + token, mask=inside, other=0.0).to(tl.float32)
    lifted = tl.where(value > unlikeliest, value, unlikeliest)  # also for NaN
    kept = tl.where((word >> (token % 32)) & 1 != 0, lifted, float("-inf"))
    tl.store(row + token, kept.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _widen(logits, records, wide, vocab_size, stride, BLOCK: tl.constexpr):
    program = tl.program_id(1).to(tl.int64)
    source = tl.load(records + program * WIDTH + PENALTY_SOURCE).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + source * stride + at, mask=at < vocab_size)
    tl.store(wide + program * vocab_size + at, value.to(tl.float32), mask=at < vocab_size)


@triton.jit
def _penalise(
    logits,  # [?, V], rows `stride` apart: original
    tokens,  # [rows, W] int32
    records,  # [P, WIDTH]
    wide,  # [P, V] float32: penalised
    vocab_size,
    stride,
    width,
    PHASE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(1).to(tl.int64)
    record = records + program * WIDTH
    prompt_len = tl.load(record + PROMPT_LEN).to(tl.int32)
    length = tl.load(record + LENGTH).to(tl.int32)
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) + (0 if PHASE == PROMPT else prompt_len)
    mask = position < (prompt_len if PHASE == PROMPT else length)
    token = tl.load(tokens + tl.load(record + PENALTY_ROW).to(tl.int64) * width + position, mask=mask, other=0)
    mask = mask & (token >= 0) & (token < vocab_size)
    place = wide + program * vocab_size + token
    if PHASE == EVERY_OUTPUT:
        # Once per occurrence. All numbers added to a logit are the same, so their order does not matter.
        frequency = tl.load(record + FREQUENCY).to(tl.float32)
        tl.atomic_add(place, tl.zeros((BLOCK,), tl.float32) - frequency, mask=mask, sem="relaxed")
    else:
        # Once, however often the token occurs: from the original logit, so that all writes of a token's logit are equal.
        source = tl.load(record + PENALTY_SOURCE).to(tl.int64)
        value = tl.load(logits + source * stride + token, mask=mask, other=0.0).to(tl.float32)
        repetition = tl.load(record + REPETITION).to(tl.float32)
        value = tl.where(value > 0, value / repetition, value * repetition)
        if PHASE == OUTPUT:
            value -= tl.load(record + PRESENCE).to(tl.float32)
        tl.store(place, value, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _ban(logits, places, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + index, mask=index < count, other=0).to(tl.int64)
    impossible = tl.full((BLOCK,), float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + place, impossible, mask=index < count)


def mask(logits: torch.Tensor, bits: torch.Tensor, at: torch.Tensor, unlikeliest: float) -> None:
    """Change the rows `at` [G] int64 of logits [S, V]: a token whose bit is not set in bits [G, ceil(V / 32)] int32 gets
    -inf, any other at least `unlikeliest`."""
    num_rows, vocab_size = len(at), logits.shape[1]
    assert logits.stride(1) == 1 and bits.shape == (num_rows, -(-vocab_size // _WORD)) and bits.is_contiguous()
    # float16 cannot hold -1e30; this is low enough.
    lowest = max(unlikeliest, torch.finfo(logits.dtype).min / 128)
    _mask[(triton.cdiv(vocab_size, _MASK_BLOCK), num_rows)](
        logits, bits, at, vocab_size, logits.stride(0), bits.shape[1], lowest, BLOCK=_MASK_BLOCK, num_warps=4
    )


def penalise(
    logits: torch.Tensor,  # [S, V]
    tokens: torch.Tensor,  # [rows, W] int32
    records: torch.Tensor,  # [P, WIDTH] float64
    max_prompt_len: int,  # of all records
    max_output_len: int,  # of all records
    has_frequency: bool,  # whether any record has a frequency penalty
) -> torch.Tensor:
    """The penalised logits of the records' rows as float32 [P, V]; `logits` is not changed."""
    num_rows, vocab_size = len(records), logits.shape[1]
    assert logits.stride(1) == 1 and tokens.stride(1) == 1 and records.is_contiguous()
    wide = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    _widen[(triton.cdiv(vocab_size, _WIDE_BLOCK), num_rows)](
        logits, records, wide, vocab_size, logits.stride(0), BLOCK=_WIDE_BLOCK, num_warps=4
    )
    # In this order: the result for a token of the output replaces the one for the same token of the prompt.
    for phase, length in (
        (PROMPT, max_prompt_len),
        (OUTPUT, max_output_len),
        (EVERY_OUTPUT, max_output_len if has_frequency else 0),
    ):
        if length > 0:  # samples of a draft model inside a prompt do not count, and have no output
            _penalise[(triton.cdiv(length, _BLOCK), num_rows)](
                logits, tokens, records, wide, vocab_size, logits.stride(0), tokens.stride(0),
                PHASE=phase.value, BLOCK=_BLOCK, num_warps=4,
            )  # fmt: skip
    return wide


def ban(logits: torch.Tensor, places: torch.Tensor) -> None:
    """Set the logits at places [N] float64, each row * stride + id, to -inf."""
    if len(places):
        _ban[(triton.cdiv(len(places), _BLOCK),)](logits, places, len(places), BLOCK=_BLOCK, num_warps=4)
