"""On a GPU: pages in pinned memory and on disk come back as they were, beside steps, and tokens stay the same."""

import pytest
import torch

from octavo import LLM
from octavo.device import pick
from tests.doubles import write_byte_tokenizer
from tests.engine.test_engine_tier_restart import load_always, one_by_one
from tests.worker.test_worker_page_transfer import check_mover, check_transfer
from tests.worker.tiny import write_tiny_llama

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page_dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_pages_come_back_as_they_were(page_dim, dtype):
    check_transfer(pick("cuda"), page_dim, dtype)


def test_a_load_takes_pages_from_memory_and_from_files(tmp_path):
    check_mover(pick("cuda"), tmp_path)


def start(folder, tier: str) -> LLM:
    return LLM(str(folder), device="cuda", dtype="bfloat16", deterministic=True, block_size=16, max_num_seqs=4, max_model_len=96,
               kv_cache_memory_bytes="26k", kv_tier=tier, enforce_eager=True)  # fmt: skip


def test_tokens_are_the_same_from_memory_and_from_files(tmp_path, monkeypatch):
    load_always(monkeypatch)
    write_tiny_llama(tmp_path / "m", num_heads=2)
    write_byte_tokenizer(tmp_path / "m")
    with start(tmp_path / "m", "") as llm:
        expected = one_by_one(llm)
        assert llm.report.num_pages < 9, "one or two prompts fit"
    with start(tmp_path / "m", "ram:16M") as llm:
        assert one_by_one(llm) == expected
        assert llm._loop.tier.stats.ram_loaded_pages > 0
    disk = f"disk:64MiB:{tmp_path / 'tier'}"
    with start(tmp_path / "m", f"ram:16M,{disk}") as llm:
        assert one_by_one(llm) == expected
    with start(tmp_path / "m", disk) as llm:
        assert one_by_one(llm) == expected
        assert llm._loop.tier.stats.loaded_pages > 0, "after a restart, from files"
