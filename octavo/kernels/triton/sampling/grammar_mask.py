"""Logits without the tokens that a row's grammar does not leave, by bits that the host has computed.
Knows nothing of grammars."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # logits that a program goes over
_WORD = 32  # tokens that a word has bits for


@triton.jit
def _keep(logits, bits, at, vocab_size, stride, num_words, unlikeliest, BLOCK: tl.constexpr):
    number = tl.program_id(1).to(tl.int64)
    row = logits + tl.load(at + number) * stride
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(bits + number * num_words + token // 32, mask=inside, other=0)
    value = tl.load(row + token, mask=inside, other=0.0).to(tl.float32)
    lifted = tl.where(value > unlikeliest, value, unlikeliest)  # NaN, too
    kept = tl.where((word >> (token % 32)) & 1 != 0, lifted, float("-inf"))
    tl.store(row + token, kept.to(logits.dtype.element_ty), mask=inside)


def keep(logits: torch.Tensor, bits: torch.Tensor, at: torch.Tensor, unlikeliest: float) -> None:
    """Rows `at` [G] int64 of logits [S, V] are changed: a token without its bit in bits [G, ceil(V / 32)] int32 becomes
    impossible, any other at least as likely as `unlikeliest`."""
    num_rows, vocab_size = len(at), logits.shape[1]
    assert logits.stride(1) == 1 and bits.shape == (num_rows, -(-vocab_size // _WORD)) and bits.is_contiguous()
    # In 16 bits -1e30 may not exist; what is there in its place is low enough.
    lowest = max(unlikeliest, torch.finfo(logits.dtype).min / 128)
    _keep[(triton.cdiv(vocab_size, _BLOCK), num_rows)](
        logits, bits, at, vocab_size, logits.stride(0), bits.shape[1], lowest, BLOCK=_BLOCK, num_warps=4
    )
