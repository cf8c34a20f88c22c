"""A real model on a CPU with a disk tier: after a restart prefixes come from files, and every token is the one that is computed."""

import random

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from tests.doubles import write_byte_tokenizer
from tests.worker.tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)


def start(folder, tier: str = "", **options) -> LLM:
    return LLM(
        str(folder),
        device="cpu",
        block_size=4,
        max_num_seqs=4,
        kv_cache_memory_bytes="4M",
        kv_tier=tier,
        cpu_threads=1,
        **options,
    )


def prompts() -> list[list[int]]:
    dice = random.Random(3)
    system = [dice.randrange(3, 150) for _ in range(40)]
    return [
        system[: dice.randrange(8, 41)] + [dice.randrange(3, 150) for _ in range(dice.randrange(1, 30))]
        for _ in range(24)
    ]


def answers(llm: LLM, params: SamplingParams) -> tuple[list[tuple[int, ...]], int]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs], sum(
        output.num_cached_tokens for output in outputs
    )


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_are_the_same_without_a_tier_with_one_and_after_a_restart(tmp_path, params):
    write_tiny_llama(tmp_path / "m")
    write_byte_tokenizer(tmp_path / "m")
    tier = f"disk:64MiB:{tmp_path / 'tier'}"
    with start(tmp_path / "m") as llm:
        expected, num_cached = answers(llm, params)
    with start(tmp_path / "m", tier) as llm:
        assert answers(llm, params)[0] == expected
    with start(tmp_path / "m", tier) as llm:
        again, num_from_files = answers(llm, params)
        assert again == expected
        assert num_from_files > num_cached, "prefixes came from files"
        assert llm._loop.tier.stats.loaded_pages > 0
    for file in (tmp_path / "tier").glob("*/*.kv"):
        content = bytearray(file.read_bytes())
        content[-1 - len(content) // 3] ^= 1
        file.write_bytes(content)
    with start(tmp_path / "m", tier) as llm:
        assert answers(llm, params)[0] == expected, "a changed bit is a miss"
        assert llm._loop.tier.state().files["bad"] > 0


def test_another_page_size_shares_nothing(tmp_path):
    write_tiny_llama(tmp_path / "m")
    write_byte_tokenizer(tmp_path / "m")
    tier = f"disk:64MiB:{tmp_path / 'tier'}"
    with start(tmp_path / "m", tier) as llm:
        answers(llm, GREEDY)
    with LLM(
        str(tmp_path / "m"), device="cpu", block_size=8, kv_cache_memory_bytes="4M", kv_tier=tier, cpu_threads=1
    ) as llm:
        assert llm._loop.tier.stats.num_keys == 0


@pytest.mark.parametrize(
    ("tier", "why"),
    [("ram:8GiB", "in memory already"), ("disk:8GiB", "disk:SIZE:FOLDER"), ("tape:1G:/x", "is no tier")],
)
def test_a_tier_that_is_none_is_refused(tier, why):
    with pytest.raises(ConfigError, match=why):
        LLM("anything", kv_tier=tier)
