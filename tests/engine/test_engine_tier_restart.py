"""A real model on a CPU with a disk tier: after a restart prefixes come from files, and every token is the one that is computed."""

import functools
import random

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.tier_traffic import TierTraffic
from octavo.errors import ConfigError
from octavo.executor import local
from octavo.worker import page_mover
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
        kv_tier=tier,
        cpu_threads=1,
        **{"kv_cache_memory_bytes": "4M"} | options,
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


def load_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a model as small as this one computes faster."""
    monkeypatch.setattr(TierTraffic, "_compute_seconds", lambda self, start, count: float("inf"))


def one_by_one(llm: LLM) -> list[tuple[int, ...]]:
    """Each prompt, twice, in a store that holds one or two of them; all that is to be stored is stored in between."""
    found = []
    for prompt in 2 * prompts():
        output = llm.generate([{"prompt_token_ids": prompt}], SEEDED, use_tqdm=False)[0]
        found.append(tuple(output.outputs[0].token_ids))
        tier = llm._loop.tier
        while tier is not None and (tier.offer(0) or tier._copying):
            tier.take(0.02)
    return found


def test_tokens_are_the_same_with_pages_in_other_memory_of_the_host(tmp_path, monkeypatch):
    """The way of a GPU's pages: through host memory, some of which stay there. Here the device's memory is a CPU's (tests/gpu has a GPU's)."""
    monkeypatch.setattr(local, "open_mover", functools.partial(page_mover.open_mover, through_host=True))
    load_always(monkeypatch)
    write_tiny_llama(tmp_path / "m")
    write_byte_tokenizer(tmp_path / "m")
    small = {"kv_cache_memory_bytes": "22k", "max_model_len": 80}
    with start(tmp_path / "m", **small) as llm:
        expected = one_by_one(llm)
        assert llm.report.num_pages < 30
    with start(tmp_path / "m", "ram:1M", **small) as llm:
        assert one_by_one(llm) == expected
        stats = llm._loop.tier.stats
        assert stats.ram_loaded_pages == stats.loaded_pages > 100 and not stats.num_keys
    disk = f"disk:64MiB:{tmp_path / 'tier'}"
    with start(tmp_path / "m", f"ram:20k,{disk}", **small) as llm:
        assert one_by_one(llm) == expected
        stats = llm._loop.tier.stats
        assert 0 < stats.ram_loaded_pages < stats.loaded_pages, "memory holds few pages, the disk all"
    with start(tmp_path / "m", disk, **small) as llm:
        assert one_by_one(llm) == expected
        assert llm._loop.tier.stats.loaded_pages > 100, "after a restart, from files"


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
    [
        ("disk:8GiB", "disk:SIZE:FOLDER"),
        ("tape:1G:/x", "is no tier"),
        ("ram:8GiB:/x", "is no tier"),
        ("ram:0", "is no tier"),
        ("ram:1G,ram:2G", "one tier of the kind ram"),
        ("disk:1G:/x,disk:1G:/y", "one tier of the kind disk"),
    ],
)
def test_a_tier_that_is_none_is_refused(tier, why):
    with pytest.raises(ConfigError, match=why):
        LLM("anything", kv_tier=tier)


def test_memory_of_the_host_is_no_tier_of_a_cpu(tmp_path):
    write_tiny_llama(tmp_path / "m")
    with pytest.raises(ConfigError, match="in memory already"):
        start(tmp_path / "m", "ram:1GiB")
