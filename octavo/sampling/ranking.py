"""The likeliest of each row of logits, and what their logprobs are relative to: the same whoever else is looked at.
Knows nothing of who wants them."""

import importlib.util

import torch

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def log_sum(logits: torch.Tensor) -> torch.Tensor:
    """[P, V] float32 → log Σ exp, [P, 1] float64, so that the order of the sum, which may depend on how many rows there are,
    is below what a logprob in float32 shows. On a GPU there is one order."""
    if logits.is_cuda and _HAS_TRITON:
        from octavo.kernels.triton.sampling.log_sum import (
            log_sum as by_kernel,  # needs Triton, which only a GPU machine must have
        )

        return by_kernel(logits)
    return logits.double().logsumexp(-1, keepdim=True)


def best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[P, V] float32 → the largest in falling order and their ids, [P, count] each."""
    if not logits.is_cuda:
        values, ids = logits.topk(count, -1)
        return values, ids
    # A GPU's topk looks for them in another way when rows are many, and which of two equals it finds depends on that. 16-bit
    # logits are often equal. So: whole numbers that are never equal, in the order of the logits, and then the lower id first.
    bits = (logits + 0.0).view(torch.int32).long()  # −0 is the equal of 0
    key = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    key = torch.where(logits.isnan(), -(1 << 31), key)
    places = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    ids = ((key << 32) + places).topk(count, -1).indices
    return logits.gather(1, ids), ids
