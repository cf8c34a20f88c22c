"""Adapters on several ranks: every rank reads its share, and the tokens are those of one rank."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, LoRARequest, SamplingParams
from octavo.engine.adapter_traffic import AdapterTraffic
from octavo.errors import ConfigError, EngineDead, InvalidRequest
from octavo.executor.processes import ProcessExecutor
from octavo.messages import AdapterRef
from tests.adapters import ALL, write_model, write_peft
from tests.native import native

native()  # skips this file where there are no kernels

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 4,
    "max_num_seqs": 8,
    "cpu_threads": 1,
    "kv_cache_memory_bytes": 2**20,
    "enable_lora": True,
}
PROMPTS = [[(11 * at + 5 * i) % 290 for i in range(3 + 7 * at % 30)] for at in range(8)]


@dataclass
class Served:
    folder: str
    adapters: list[LoRARequest | None]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    place = tmp_path_factory.mktemp("served")
    weights = write_model(place / "model", 128)
    last_layer = {name: weight for name, weight in weights.items() if ".layers.1." in name}
    folders = [
        write_peft(place / "all", weights, rank=9, targets=ALL, seed=1),
        write_peft(place / "attention", weights, rank=16, seed=2, targets=("q_proj", "v_proj", "o_proj")),
        write_peft(
            place / "last", last_layer, rank=4, seed=3, targets=("down_proj", "k_proj")
        ),  # one stage has nothing of it
    ]
    adapters: list[LoRARequest | None] = [LoRARequest(folder.name, 1, str(folder)) for folder in folders]
    return Served(str(place / "model"), [*adapters, None], weights)


Scores = list[tuple[list[int], list[float]]]


def answers(llm: LLM, served: Served) -> Scores:
    """Tokens and their logprobs, of all adapters and the base in one batch."""
    adapters = [served.adapters[at % 4] for at in range(len(PROMPTS))]
    found = []
    for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=adapters):
        choice = output.outputs[0]
        scores = zip(choice.token_ids, choice.logprobs or [], strict=True)
        found.append((choice.token_ids, [at[token].logprob for token, at in scores]))
    return found


@pytest.fixture(scope="module")
def alone(served: Served) -> Scores:
    with LLM(served.folder, **OPTIONS) as llm:
        found = answers(llm, served)
    assert len({tuple(tokens) for tokens, _ in found}) == len(PROMPTS)
    return found


def test_two_by_two_ranks_give_one_ranks_tokens(served: Served, alone: Scores) -> None:
    """Sums over ranks are in another order than one rank's: the logprobs are close, and the tokens are the same."""
    with LLM(served.folder, **OPTIONS, tensor_parallel_size=2, pipeline_parallel_size=2) as llm:
        found = answers(llm, served)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]
    scores, expected = (torch.tensor([scores for _, scores in each]) for each in (found, alone))
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)


def test_two_stages_give_one_ranks_bits(served: Served, alone: Scores, tmp_path: Path) -> None:
    """With memory for one adapter. What does not fit the model ends its own requests, and a stage that is killed the engine: also one that
    had nothing to do but read an adapter."""
    wide = {name: torch.zeros(40, 40) for name in served.weights if "q_proj" in name}
    bad = LoRARequest("wide", 1, str(write_peft(tmp_path / "wide", wide)))
    new = LoRARequest("new", 1, str(write_peft(tmp_path / "new", served.weights, seed=7)))
    with LLM(served.folder, **OPTIONS, pipeline_parallel_size=2, lora_memory=66_000) as llm:
        assert answers(llm, served) == alone
        executor, traffic = llm._loop.executor, llm._loop.adapters
        assert isinstance(executor, ProcessExecutor) and isinstance(traffic, AdapterTraffic)
        with pytest.raises(ConfigError, match="40 × 40"):
            executor.check_adapter(AdapterRef("wide", bad.path))
        with pytest.raises(InvalidRequest, match="40 × 40"):
            llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False, lora_request=bad)
        assert answers(llm, served) == alone
        assert traffic.stats.dropped >= 3 and traffic.state().num_bytes <= 66_000
        os.kill(executor._ranks[0]._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
        with pytest.raises(EngineDead, match="rank 0 was killed by signal 9"):
            llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False, lora_request=new)
