"""Adapters on a GPU, through the whole engine: in captured steps and without, mixed, evicted, and around weights of few bits."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo import LLM, LoRARequest, SamplingParams
from octavo.engine.adapter_traffic import AdapterTraffic
from octavo.messages.plans import Logprobs
from tests.adapters import ALL, ATTENTION, merged, weights_of, write_peft

pytestmark = pytest.mark.gpu

VOCAB_SIZE, NUM_TOKENS = 300, 24
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [[(13 * at + 7 * i) % VOCAB_SIZE for i in range(2 + 11 * at % 70)] for at in range(12)]


@dataclass
class Served:
    folder: str
    adapters: list[LoRARequest | None]  # the last one: the base alone
    models: list[Any]  # the same, merged, by transformers


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.14,
    )
    base = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in base.parameters():
            weight.copy_(weight.bfloat16())
    place = tmp_path_factory.mktemp("served")
    base.save_pretrained(place / "model")
    weights = weights_of(place / "model")
    folders = [
        write_peft(place / "a", weights, rank=8, seed=1, size=0.7),
        write_peft(place / "b", weights, rank=16, targets=ALL, seed=2, size=0.7),
        write_peft(place / "c", weights, rank=70, targets=ATTENTION, seed=3, alpha=70, size=0.7),
    ]
    models: list[Any] = []
    for folder in folders:
        model = LlamaForCausalLM(config).eval()
        model.load_state_dict(merged(weights, folder), strict=False)
        models.append(model.cuda())
    adapters: list[LoRARequest | None] = [LoRARequest(folder.name, 1, str(folder)) for folder in folders]
    return Served(str(place / "model"), [*adapters, None], [*models, base.cuda()])


def engine(served: Served, **options: Any) -> LLM:
    settings = {
        "device": "cuda",
        "dtype": "bfloat16",
        "kv_cache_memory_bytes": 2**27,
        "max_num_seqs": 16,
        "enable_lora": True,
    }
    return LLM(served.folder, **(settings | {"lora_memory": 2**25} | options))


def mix(served: Served) -> list[LoRARequest | None]:
    return [served.adapters[at % 4] for at in range(len(PROMPTS))]


def scored(llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest | None]) -> list[list[Logprobs]]:
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=adapters)
    return [output.outputs[0].logprobs or [] for output in outputs]


def tokens(llm: LLM, adapters: list[LoRARequest | None]) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=adapters)
    return [output.outputs[0].token_ids for output in outputs]


@torch.inference_mode()
def check_scores(served: Served, found: list[list[Logprobs]], adapters: list[LoRARequest | None], limit: float) -> None:
    """Of the tokens that were sampled, against the merged models in float32."""
    errors, effects = [], []
    for prompt, scores, adapter in zip(PROMPTS, found, adapters, strict=True):
        chosen = [max(at, key=lambda token: at[token].logprob) for at in scores]
        ids = torch.tensor([prompt + chosen], device="cuda")
        model, base = served.models[served.adapters.index(adapter)], served.models[-1]
        for at, (token, wanted, plain) in enumerate(
            zip(
                chosen,
                *(each(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for each in (model, base)),
                strict=True,
            )
        ):
            errors.append(abs(scores[at][token].logprob - float(wanted[token])))
            if adapter is not None:
                effects.append(abs(float(plain[token] - wanted[token])))
    assert sum(errors) / len(errors) < limit < 0.75 * sum(effects) / len(effects), (sum(errors) / len(errors), limit)


@pytest.mark.parametrize(
    "options", [{}, {"enforce_eager": True}, {"deterministic": True}, {"dtype": "float16"}], ids=str
)
def test_near_the_merged_models(served: Served, options: dict[str, Any]) -> None:
    with engine(served, **options) as llm:
        check_scores(served, scored(llm, PROMPTS, mix(served)), mix(served), 0.2)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_around_weights_of_few_bits(served: Served, quantization: str) -> None:
    with engine(served, quantization=quantization) as llm:
        check_scores(served, scored(llm, PROMPTS, mix(served)), mix(served), 2.0 if quantization == "int4" else 1.0)


def test_captured_steps_give_the_tokens_of_others(served: Served) -> None:
    """And a step without adapters is captured without them. Answers are compared when all adapters are in memory: then all requests come at
    once, and steps have the same rows."""
    adapters = mix(served)
    with engine(served, enforce_eager=True, enable_prefix_caching=False) as llm:
        tokens(llm, adapters)
        expected = tokens(llm, adapters)
    with engine(served, enable_prefix_caching=False) as llm:
        graphs = llm._loop.executor._runner.graphs  # type: ignore[attr-defined]
        tokens(llm, [None] * len(PROMPTS))
        assert graphs.num_captured and not any(key.adapted for key in graphs._captured)
        tokens(llm, adapters)
        assert tokens(llm, adapters) == expected
        assert len({key.adapted for key in graphs._captured}) >= 2
        captured = graphs.num_captured
        assert tokens(llm, [served.adapters[at % 2 + 1] for at in range(len(PROMPTS))]) != expected
        assert graphs.num_captured <= captured + len(PROMPTS), "other adapters and ranks need no other graphs"


@pytest.mark.parametrize("quantization", ["auto", "fp8", "int4"])
def test_deterministic_bits_do_not_depend_on_the_mix(served: Served, quantization: str) -> None:
    adapters, options = mix(served), {"deterministic": True, "quantization": quantization}
    with engine(served, **options, enable_prefix_caching=False) as llm:
        together = scored(llm, PROMPTS, adapters)
        for number in range(5):
            assert scored(llm, [PROMPTS[number]], [adapters[number]]) == [together[number]]
        assert scored(llm, PROMPTS[::-1], adapters[::-1]) == together[::-1]
    with engine(served, **options, enable_lora=False, lora_memory="auto") as llm:
        outputs = llm.generate(PROMPTS[3::4], PARAMS, use_tqdm=False)
        assert [output.outputs[0].logprobs for output in outputs] == together[3::4], "as without --enable-lora"


def test_a_budget_for_one_adapter(served: Served) -> None:
    adapters = mix(served)
    with engine(served, deterministic=True) as llm:
        expected = scored(llm, PROMPTS, adapters)
        assert llm._loop.adapters is not None
        largest = max(one.num_bytes for one in llm._loop.adapters._adapters.values())
    with engine(served, deterministic=True, lora_memory=largest) as llm:
        for _ in range(3):
            assert scored(llm, PROMPTS, adapters) == expected
        traffic = llm._loop.adapters
        assert isinstance(traffic, AdapterTraffic) and traffic.stats.dropped >= 4
