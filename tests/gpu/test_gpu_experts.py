"""Experts in a CUDA graph: one capture serves every step of the same size, for any routing."""

import pytest
import torch

from octavo.kernels.triton.moe.experts import ExpertTensors, experts, plan_experts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("num_tokens", "is_packed"), [(1, False), (8, True), (300, False)])
def test_a_graph_gives_what_launches_give(num_tokens: int, is_packed: bool) -> None:
    torch.manual_seed(num_tokens)
    num_experts, depth, inner = 32, 256, 192

    def weights(num_rows: int, width: int) -> ExpertTensors:
        if not is_packed:
            return ExpertTensors(torch.randn(num_experts, num_rows, width, device="cuda").mul_(0.05).bfloat16())
        codes = torch.randint(0, 256, (num_experts, num_rows, width // 2), device="cuda", dtype=torch.uint8)
        return ExpertTensors(
            codes, torch.full((num_experts, num_rows, width // 32), 121, device="cuda", dtype=torch.uint8)
        )

    gate_up, down = weights(2 * inner, depth), weights(depth, inner)
    x = torch.randn(num_tokens, depth, device="cuda").bfloat16()
    logits = torch.randn(num_tokens, num_experts, device="cuda").bfloat16()

    def step() -> torch.Tensor:
        return experts(x, plan_experts(logits, 4, True), gate_up, down, (1.0, 0.0, 0.0), None)

    step()  # the first call compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(num_tokens, depth))
        logits.copy_(torch.randn(num_tokens, num_experts))
        if seed == 2:
            logits[:, 3:7] += 50  # route all tokens to the same four
        graph.replay()
        assert torch.equal(captured, step())
        assert captured.isfinite().all() and captured.float().std() > 0.01
