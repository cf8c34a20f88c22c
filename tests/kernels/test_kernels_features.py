"""Features of a draft head in a captured step: read and written by the device's own tables, against plain indexing."""

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.triton.runtime.features import features_before, keep_features

NUM_ROWS, MAX_PAGES, PAGE_SIZE, NUM_PAGES = 5, 6, 4, 40
ROWS, LENS = [3, -1 - 3, 3, 0, 1, 0], [9, 5, 24, 1, 2, 0]  # the last one is padding, the fourth has no position before


@pytest.mark.parametrize("width", [48, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_gets_the_feature_of_the_position_before(device, width, dtype):
    generator = torch.Generator().manual_seed(1)
    store = torch.randn(NUM_PAGES * PAGE_SIZE, width, generator=generator).to(device, dtype)
    pages = torch.randperm(NUM_PAGES, generator=generator)[: NUM_ROWS * MAX_PAGES].view(NUM_ROWS, MAX_PAGES).int()
    rows, lens = (torch.tensor(column, dtype=torch.int32, device=device) for column in (ROWS, LENS))
    out = torch.full((len(ROWS), width), torch.nan, dtype=dtype, device=device)
    features_before(rows, lens, pages.to(device), PAGE_SIZE, store, out)
    for at, (row, length) in enumerate(zip(ROWS, LENS, strict=True)):
        row, before = row if row >= 0 else -1 - row, length - 2
        if before < 0:
            assert not out[at].any()
            continue
        slot = int(pages[row, before // PAGE_SIZE]) * PAGE_SIZE + before % PAGE_SIZE
        assert torch.equal(out[at], store[slot])


@pytest.mark.parametrize("width", [48, 2500])
@pytest.mark.parametrize("are_sampled", [False, True])
def test_features_go_to_the_slots_of_their_tokens_and_padding_writes_nowhere(device, width, are_sampled):
    generator = torch.Generator().manual_seed(2)
    store = torch.randn(NUM_PAGES * PAGE_SIZE, width, generator=generator).to(device, torch.bfloat16)
    features = torch.randn(4, width, generator=generator).to(device, torch.bfloat16)
    slots, rows = [7, 31, 0, -1], [2, -1 - 2, 4, 0]
    expected = store.clone()
    kept = [0, 2] if are_sampled else [0, 1, 2]
    for at in kept:
        expected[slots[at]] = features[at]
    of_rows = torch.tensor(rows, dtype=torch.int32, device=device) if are_sampled else None
    keep_features(features, torch.tensor(slots, device=device), store, of_rows)
    assert torch.equal(store, expected)
