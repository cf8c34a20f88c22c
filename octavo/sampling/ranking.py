"""Top logits and log-sum-exp of each row, for logprobs. A row's result does not depend on the other rows."""

import importlib.util

import torch

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def log_sum(logits: torch.Tensor) -> torch.Tensor:
    """[P, V] float32 → log Σ exp, [P, 1] float64. The order of torch's sum may depend on the number of rows; in float64 the
    difference does not show in a float32 logprob. The Triton kernel has one order."""
    if logits.is_cuda and _HAS_TRITON:
        from octavo.kernels.triton.sampling.log_sum import (
            log_sum as by_kernel,  # needs Triton, which only a GPU machine must have
        )

        return by_kernel(logits)
    return logits.double().logsumexp(-1, keepdim=True)


def best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[P, V] float32 → the largest logits, descending, and their ids, [P, count] each."""
    if not logits.is_cuda:
        values, ids = logits.topk(count, -1)
        return values, ids
    # On a GPU topk uses another algorithm for many rows, and which of two equal values it returns depends on that. 16-bit
    # logits are often equal. So: search distinct integer keys, ordered by logit and, for equal logits, lower id first.
    bits = (logits + 0.0).view(torch.int32).long()  # −0 becomes 0
    key = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    key = torch.where(logits.isnan(), -(1 << 31), key)
    places = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    ids = ((key << 32) + places).topk(count, -1).indices
    return logits.gather(1, ids), ids
