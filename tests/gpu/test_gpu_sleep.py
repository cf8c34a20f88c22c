"""An engine that sleeps on a GPU frees its memory, and gives the same tokens when it is awake again."""

from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.doubles import write_byte_tokenizer
from tests.worker.tiny import write_tiny_llama

pytestmark = pytest.mark.gpu

PROMPTS = [[5 + number, *range(10, 30)] for number in range(6)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def test_sleep_frees_memory_and_changes_no_token(tmp_path: Path) -> None:
    """Asleep again while the pinned memory of the sleep before is still being freed, and after it is freed."""
    write_tiny_llama(tmp_path, num_heads=2)
    write_byte_tokenizer(tmp_path)
    options = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, "max_model_len": 96}
    with LLM(str(tmp_path), kv_cache_memory_bytes=2**28, **options) as llm:
        runner = llm._loop.executor._runner  # type: ignore[attr-defined]

        def tokens() -> list[list[int]]:
            return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]

        expected = tokens()
        for settles in (False, True, False):
            before = torch.cuda.mem_get_info()[0]
            llm._loop.sleep()
            assert torch.cuda.mem_get_info()[0] >= before + 2**28, "the pages and the weights"
            llm._loop.wake_up()
            assert tokens() == expected
            if settles:
                runner._host_chunks.settle()
                assert not runner._host_chunks.num_unused
