"""Experts in Triton against torch: which experts are chosen, how pairs are sorted into blocks, and the results."""

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.triton.moe import experts as kernels
from octavo.kernels.triton.moe.expert_plan import Tiles
from octavo.kernels.triton.moe.experts import ExpertTensors
from octavo.quants import Quants
from octavo.weights.methods.base import Gate
from octavo.weights.methods.torch_experts import choose

TILES = Tiles(16, 32, 32, 4, 2)


def by_torch(x, chosen, weights, gate_up, down, gate, residual):
    """The expected result, pair by pair, in float64."""
    (up_weight, _, up_bias), (down_weight, _, down_bias) = gate_up, down
    y = residual.double() if residual is not None else torch.zeros_like(x, dtype=torch.float64)
    for token in range(len(x)):
        for expert, share in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            inner = up_weight[expert].double() @ x[token].double()
            inner = inner + (0 if up_bias is None else up_bias[expert].double())
            out = down_weight[expert].double() @ gate(*inner.chunk(2))
            y[token] += share * (out + (0 if down_bias is None else down_bias[expert].double()))
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_normalised", [True, False])
def test_the_choice_is_torchs(is_normalised, dtype, device):
    torch.manual_seed(3)
    logits = (torch.randn(7, 6, device=device) * 3).to(dtype)
    logits[1, 2:5] = 4.0  # equal logits: the first of them is chosen
    logits[2, :] = float("-inf")
    logits[2, 3] = 1.0
    logits[3, 1] = -0.0
    logits[3, 0] = 0.0
    plan = kernels.plan_experts(logits, 3, is_normalised)
    chosen, weights = choose(logits, 3, is_normalised)
    assert plan.chosen.tolist() == chosen.tolist()
    torch.testing.assert_close(plan.weights, weights)


@pytest.mark.parametrize("is_normalised", [True, False])
def test_a_tokens_choice_has_the_same_bits_in_any_company(is_normalised, device):
    """One program plans for few tokens, and many of two heights for more."""
    torch.manual_seed(4)
    logits = torch.randn(2100, 40, device=device)
    together = kernels.plan_experts(logits, 6, is_normalised)
    for count in (1, 3, 20, 300):
        plan = kernels.plan_experts(logits[:count], 6, is_normalised)
        assert torch.equal(plan.weights, together.weights[:count])
        assert torch.equal(plan.chosen, together.chosen[:count])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_of_16_bits_are_in_the_order_of_their_numbers(dtype, device):
    """Numbers of all sizes, beside random others, and equal ones."""
    every = torch.arange(-0x8000, 0x8000, 211, dtype=torch.int32).to(torch.int16).view(dtype)
    every = torch.cat((every[every.abs() < 1e38], torch.tensor([0.0, -0.0], dtype=dtype)))
    torch.manual_seed(9)
    table = torch.stack((every, *(every[torch.randperm(len(every))] for _ in range(3)), every), dim=1).to(device)
    plan = kernels.plan_experts(table, 4, True)
    # Of equal ones the first; zeros are equal.
    expected = (table.float() + 0.0).cpu().sort(dim=1, descending=True, stable=True).indices[:, :4]
    assert torch.equal(plan.chosen.cpu().long(), expected)


def test_a_token_that_is_no_number_is_sent_somewhere_with_weights_that_are_none(device):
    logits = torch.randn(3, 5, device=device)
    logits[1, 4] = float("nan")
    plan = kernels.plan_experts(logits, 5, True)
    assert sorted(plan.chosen[1].tolist()) == [0, 1, 2, 3, 4]
    assert plan.weights.isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen"),
    [(1, 4, 2), (50, 3, 1), (700, 5, 2), (300, 40, 3), (2100, 12, 3), (9, 40, 3)],
)
def test_blocks_hold_every_pair_once_in_order(num_tokens, num_experts, num_chosen, device):
    torch.manual_seed(num_tokens)
    plan = kernels.plan_experts(torch.randn(num_tokens, num_experts, device=device), num_chosen, True, TILES)
    flat = plan.chosen.flatten().long()
    assert plan.order.tolist() == flat.argsort(stable=True).tolist()
    assert torch.equal(plan.places[plan.order.long()], torch.arange(len(flat), dtype=torch.int32, device=device))
    places, seen = [], []
    for expert, first, count, _ in plan.blocks.tolist():
        if expert < 0:
            seen.append(None)
            continue
        assert seen.count(None) == 0 and 0 < count <= TILES.block_m, "blocks that are needed come first, and hold rows"
        seen.append(expert)
        assert set(flat[plan.order[first : first + count].long()].tolist()) == {expert}
        places += range(first, first + count)
    assert places == list(range(num_tokens * num_chosen))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_equal_torch(dtype, bias, device):
    torch.manual_seed(5)
    num_experts, depth, inner = 5, 40, 24
    gate = Gate(1.7, 0.6, 1.0) if bias else Gate()

    def some(*shape):
        return (torch.randn(shape, device=device) * 0.3).to(dtype)

    gate_up = ExpertTensors(some(num_experts, 2 * inner, depth), None, some(num_experts, 2 * inner) if bias else None)
    down = ExpertTensors(some(num_experts, depth, inner), None, some(num_experts, depth) if bias else None)
    for num_tokens in (1, 30):
        x, residual = some(num_tokens, depth) * 4, some(num_tokens, depth) if bias else None
        plan = kernels.plan_experts(some(num_tokens, num_experts).float() * 9, 2, True, TILES)
        expected = by_torch(x, plan.chosen, plan.weights, gate_up, down, gate, residual)
        found = kernels.experts(x, plan, gate_up, down, (gate.alpha, gate.limit, gate.offset), residual)
        assert found.dtype == dtype and (residual is None or found is residual)
        error = (found.double() - expected).norm() / expected.norm()
        assert error < (1e-6 if dtype == torch.float32 else 6e-3)


def test_a_row_has_the_same_bits_in_any_company(device):
    """With the same tiles: a program's sums do not depend on the other rows."""
    torch.manual_seed(6)
    gate_up, down = torch.randn(4, 32, 48, device=device), torch.randn(4, 48, 16, device=device)
    x, logits = torch.randn(40, 48, device=device), torch.randn(40, 4, device=device)

    def run(rows):
        plan = kernels.plan_experts(logits[rows], 2, False, TILES)
        return kernels.experts(x[rows], plan, ExpertTensors(gate_up), ExpertTensors(down), (1.0, 0.0, 0.0), None)

    together = run(slice(0, 40))
    assert torch.equal(run(slice(7, 8))[0], together[7])
    assert torch.equal(run(slice(30, 36)), together[30:36])


def test_a_broken_row_stays_alone(device):
    torch.manual_seed(7)
    gate_up, down = torch.randn(3, 32, 16, device=device), torch.randn(3, 16, 16, device=device)
    x, logits = torch.randn(6, 16, device=device), torch.randn(6, 3, device=device)
    weights = ExpertTensors(gate_up), ExpertTensors(down), (1.7, 0.5, 1.0)
    expected = kernels.experts(x, kernels.plan_experts(logits, 2, True, TILES), *weights, None)
    x[2, 3] = logits[2, 1] = float("nan")
    found = kernels.experts(x, kernels.plan_experts(logits, 2, True, TILES), *weights, None)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])


def test_no_tokens(device):
    plan = kernels.plan_experts(torch.empty(0, 4, device=device), 2, True)
    weights = ExpertTensors(torch.empty(4, 8, 16, device=device)), ExpertTensors(torch.empty(4, 16, 4, device=device))
    assert kernels.experts(torch.empty(0, 16, device=device), plan, *weights, (1.0, 0.0, 0.0), None).shape == (0, 16)


def test_weights_of_four_bits_are_decoded_exactly(device):
    """bfloat16 holds each weight exactly, so the sums of one product are those over the decoded weights."""
    generator = torch.Generator().manual_seed(8)
    num_experts, depth, inner = 3, 96, 64

    def packed(num_rows, width):
        quants = torch.randint(
            0, 256, (num_experts * num_rows, width // 32, 17), dtype=torch.uint8, generator=generator
        )
        quants[:, :, 0] = torch.randint(122, 126, quants.shape[:2], dtype=torch.uint8, generator=generator)
        quants[0, 0, 0] = 0  # the smallest scale
        decoded = Quants("MXFP4", quants.flatten(1)).dequantise().view(num_experts, num_rows, width)
        codes = quants[:, :, 1:].reshape(num_experts, num_rows, width // 2).to(device)
        scales = quants[:, :, 0].contiguous().view(num_experts, num_rows, width // 32).to(device)
        return ExpertTensors(codes, scales), ExpertTensors(decoded.to(device, torch.bfloat16))

    (gate_up, plain_gate_up), (down, plain_down) = packed(2 * inner, depth), packed(depth, inner)
    x = torch.randn(21, depth, generator=generator).to(device, torch.bfloat16)
    plan = kernels.plan_experts(torch.randn(21, num_experts, generator=generator).to(device), 2, True, TILES)
    gate = (1.7, 7.0, 1.0)
    found = kernels.experts(x, plan, gate_up, down, gate, None)
    expected = kernels.experts(x, plan, plain_gate_up, plain_down, gate, None)
    assert expected.float().std() > 0.1
    torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
