"""log Σ exp of rows by the kernel against torch: ordinary rows, and rows with infinities and NaN."""

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.triton.sampling.log_sum import log_sum

# A row of only -inf: numpy warns about its logarithm, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("vocab_size", [1, 1000, 2050])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_torch(vocab_size, dtype, device):
    torch.manual_seed(vocab_size)
    logits = (torch.randn(5, vocab_size, device=device) * 20).to(dtype)
    if vocab_size > 3:
        logits[1, 3], logits[2, 0], logits[3, :] = float("inf"), float("nan"), float("-inf")
    found, expected = log_sum(logits), logits.double().logsumexp(-1, keepdim=True)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12, equal_nan=True)
    alone = torch.cat([log_sum(row[None]) for row in logits])
    assert torch.equal(alone.nan_to_num(), found.nan_to_num())
