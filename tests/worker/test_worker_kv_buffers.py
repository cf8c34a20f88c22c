"""Where the layers' parts of a page lie: together where the kernels can read them so, for memory is taken where it is touched."""

from pathlib import Path

import torch

from octavo.attention.base import AttentionBackend
from octavo.worker.kv_buffers import KVBuffers
from tests.attention.test_attention_contract import chosen, make_spec
from tests.native import native

NUM_LAYERS, NUM_PAGES, PAGE_SIZE = 24, 512, 16
SPEC = make_spec((4, 2, 64), NUM_LAYERS)
PART_BYTES = 2 * 2 * PAGE_SIZE * 64 * 4


def stores_of(attention: AttentionBackend) -> tuple[KVBuffers, list[torch.Tensor]]:
    zeros = native().zeros
    stores = KVBuffers(SPEC, SPEC.page_layout(4096), attention, torch.float32, PAGE_SIZE, 1, zeros)
    return stores, stores.allocate(NUM_PAGES, 8)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_page_of_all_layers_is_one_piece_of_memory() -> None:
    stores, layers = stores_of(chosen(SPEC, torch.float32, "native_cpu"))
    assert stores.page_bytes == NUM_LAYERS * PART_BYTES
    begins = [layer[page].data_ptr() for page in (0, 1) for layer in layers]
    assert begins == [begins[0] + number * PART_BYTES for number in range(2 * NUM_LAYERS)]
    assert all(layer[page].is_contiguous() for layer in layers for page in (0, 1))
    before = resident()
    for layer in layers:
        layer[0].fill_(1.0)
    assert resident() - before < 8 * 2**20, "the first page takes memory of one place, not of one for each layer"
    assert not layers[0][1].any()


def test_a_backend_that_wants_its_pages_close_has_a_store_for_each_layer() -> None:
    _, layers = stores_of(chosen(SPEC, torch.float32, "torch_cpu"))
    assert len(layers) == NUM_LAYERS and all(layer.is_contiguous() for layer in layers)
