"""Apply grammar masks that the host has computed to logits."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # logits per program
_WORD = 32  # tokens per word


@triton.jit
def _keep(logits, bits, at, vocab_size, stride, num_words, unlikeliest, BLOCK: tl.constexpr):
    number = tl.program_id(1).to(tl.int64)
    row = logits + tl.load(at + number) * stride
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(bits + number * num_words + token // 32, mask=inside, other=0)
    value = tl.load(row + token, mask=inside, other=0.0).to(tl.float32)
    lifted = tl.where(value > unlikeliest, value, unlikeliest)  # also for NaN
    kept = tl.where((word >> (token % 32)) & 1 != 0, lifted, float("-inf"))
    tl.store(row + token, kept.to(logits.dtype.element_ty), mask=inside)


def keep(logits: torch.Tensor, bits: torch.Tensor, at: torch.Tensor, unlikeliest: float) -> None:
    """Change the rows `at` [G] int64 of logits [S, V]: a token whose bit is not set in bits [G, ceil(V / 32)] int32 gets
    -inf, any other at least `unlikeliest`."""
    num_rows, vocab_size = len(at), logits.shape[1]
    assert logits.stride(1) == 1 and bits.shape == (num_rows, -(-vocab_size // _WORD)) and bits.is_contiguous()
    # float16 cannot hold -1e30; this is low enough.
    lowest = max(unlikeliest, torch.finfo(logits.dtype).min / 128)
    _keep[(triton.cdiv(vocab_size, _BLOCK), num_rows)](
        logits, bits, at, vocab_size, logits.stride(0), bits.shape[1], lowest, BLOCK=_BLOCK, num_warps=4
    )
