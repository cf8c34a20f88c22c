"""Adapters through the whole engine: equal to the merged model, and the same bytes whatever else is in the batch."""

import json
import os
import random
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedModel

from octavo import LLM, LoRARequest, SamplingParams
from octavo.engine.adapter_traffic import AdapterTraffic
from octavo.errors import ConfigError, InvalidRequest
from octavo.messages.plans import Logprobs
from octavo.recording.format import read
from octavo.recording.recorder import Recorder, Segments
from octavo.recording.ring import RecordingRing
from octavo.replay.replay import Replay
from tests.adapters import ALL, ATTENTION, merged, weights_of, write_peft
from tests.doubles import write_byte_tokenizer
from tests.native import native
from tests.recording.recorded import header_of
from tests.small_llama import small_llama
from tests.weights.gguf_writer import Packed, write_gguf

VOCABULARY = 97
NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)

native()  # skips this file where there are no kernels


@dataclass
class Served:
    folder: str
    adapters: list[LoRARequest | None]  # the last one: the base alone
    models: list[PreTrainedModel]  # the same, merged, by transformers
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    torch.manual_seed(11)
    base = small_llama(VOCABULARY)
    place = tmp_path_factory.mktemp("served")
    base.save_pretrained(place / "model")
    weights = weights_of(place / "model")
    folders = [
        write_peft(place / "a", weights, rank=8, seed=1),
        write_peft(place / "b", weights, rank=16, targets=ALL, seed=2),
        write_peft(place / "c", weights, rank=3, targets=("down_proj", "gate_proj"), seed=3, use_rslora=True),
        write_peft(place / "d", weights, rank=40, targets=ATTENTION, seed=4, alpha=20),
    ]
    models: list[PreTrainedModel] = []
    for folder in folders:
        model = LlamaForCausalLM(base.config).eval().float()
        model.load_state_dict(merged(weights, folder), strict=False)
        models.append(model)
    rng = random.Random(5)
    stem = [rng.randrange(VOCABULARY) for _ in range(40)]
    prompts = [
        stem[: rng.randrange(8, 40)] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20))]
        for _ in range(10)
    ]
    adapters: list[LoRARequest | None] = [LoRARequest(folder.name, 1, str(folder)) for folder in folders]
    return Served(str(place / "model"), [*adapters, None], [*models, base], prompts)


def engine(served: Served, **options: Any) -> LLM:
    settings = {"page_size": 4, "kv_cache_memory_bytes": 2**20, "max_num_seqs": 16, "enable_lora": True}
    return LLM(served.folder, **(settings | {"lora_memory": 2**20} | options))


Scores = list[list[Logprobs]]


def scored(llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest | None], params: Any = PARAMS) -> Scores:
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    return [output.outputs[0].logprobs or [] for output in outputs]


def mix(served: Served, num: int = 10) -> list[LoRARequest | None]:
    """One adapter for each prompt, all of them and the base in one batch."""
    return [served.adapters[number % len(served.adapters)] for number in range(num)]


@torch.inference_mode()
def reference(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)  # type: ignore[no-any-return]


def test_equal_to_the_merged_models(served: Served) -> None:
    """Every token's logprobs, alone and mixed, by float32."""
    adapters = mix(served)
    with engine(served, dtype="float32") as llm:
        outputs = llm.generate(served.prompts, PARAMS, use_tqdm=False, lora_request=adapters)
        assert outputs[0].lora_request is not None and outputs[0].lora_request.name == "a"
    texts = set()
    for number, (output, prompt) in enumerate(zip(outputs, served.prompts, strict=True)):
        choice = output.outputs[0]
        expected = reference(served.models[number % 5], prompt, choice.token_ids)
        for at, (token, scores) in enumerate(zip(choice.token_ids, choice.logprobs or [], strict=True)):
            assert scores[token].logprob == pytest.approx(float(expected[at, token]), abs=1e-4)
            for other, score in scores.items():
                assert score.logprob == pytest.approx(float(expected[at, other]), abs=1e-4)
        texts.add(tuple(choice.token_ids))
    base = reference(served.models[-1], served.prompts[0], outputs[0].outputs[0].token_ids)
    assert (
        float((base - reference(served.models[0], served.prompts[0], outputs[0].outputs[0].token_ids)).abs().max())
        > 0.1
    )


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_bytes_do_not_depend_on_the_mix(served: Served, options: dict[str, Any]) -> None:
    """Alone, mixed, in other orders, cut into chunks, preempted, and operation by operation: the same logprobs, to the bit. Requests
    without an adapter have those of a server without the flag."""
    adapters = mix(served)
    with engine(served, **options, enable_prefix_caching=False) as llm:
        together = scored(llm, served.prompts, adapters)
        for number in range(5):
            assert scored(llm, [served.prompts[number]], [adapters[number]]) == [together[number]]
        assert scored(llm, served.prompts[::-1], adapters[::-1]) == together[::-1]
    with engine(served, **options, enable_lora=False, lora_memory="auto") as llm:
        plain = llm.generate([served.prompts[4], served.prompts[9]], PARAMS, use_tqdm=False)
        assert [output.outputs[0].logprobs for output in plain] == [together[4], together[9]]
    with engine(served, **options, max_num_batched_tokens=7) as llm:
        assert scored(llm, served.prompts, adapters) == together
    few_pages = {"kv_cache_memory_bytes": 28 * 4 * 2 * 2 * 2 * 8 * 4}
    with engine(served, **options, **few_pages, enable_prefix_caching=False) as llm:
        assert scored(llm, served.prompts, adapters) == together  # requests enter when their adapters are loaded
        assert scored(llm, served.prompts, adapters) == together  # all at once
        assert llm._loop.scheduler.num_preemptions > 0
    with engine(served, **options, enforce_eager=True) as llm:
        assert scored(llm, served.prompts, adapters) == together


def test_prefixes_belong_to_an_adapter(served: Served) -> None:
    """One prompt with every adapter, twice: the second time its pages are found, and those of no other."""
    prompt = served.prompts[0]
    prompts, adapters = [prompt] * len(served.adapters), served.adapters
    with engine(served) as llm:
        first = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=adapters)
        assert [output.num_cached_tokens for output in first] == [0] * len(adapters)
        again = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=adapters)
        assert all(output.num_cached_tokens >= len(prompt) - 4 for output in again)
        assert [output.outputs[0].logprobs for output in again] == [output.outputs[0].logprobs for output in first]
    assert len({tuple(output.outputs[0].token_ids) for output in first}) == len(adapters)


def test_the_same_content_is_one_adapter(served: Served, tmp_path: Path) -> None:
    """A copy under another name shares prefixes: they are keyed by content."""
    (first, *_) = served.adapters
    assert first is not None
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in Path(first.path).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    with engine(served) as llm:
        llm.generate([served.prompts[0]], PARAMS, use_tqdm=False, lora_request=first)
        (output,) = llm.generate(
            [served.prompts[0]], PARAMS, use_tqdm=False, lora_request=LoRARequest("copy", 2, str(copy))
        )
        assert output.num_cached_tokens > 0


def test_choices_beams_and_drafts(served: Served) -> None:
    """Several choices, a beam search and drafted tokens, beside requests with other adapters."""
    several = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    beams = SamplingParams(temperature=0, n=3, best_of=3, use_beam_search=True, max_tokens=8, ignore_eos=True)
    repeating = [[7, 8, 9, 10] * 8]
    adapters = served.adapters[:3]

    def run(together: bool, **options: Any) -> list[list[list[int]]]:
        with engine(served, **options) as llm:
            work = [(served.prompts[0], several), (served.prompts[1], beams), (repeating[0], PARAMS)]
            if together:
                prompts, params = zip(*work, strict=True)
                outputs = llm.generate(list(prompts), list(params), use_tqdm=False, lora_request=adapters)
            else:
                outputs = [
                    llm.generate([prompt], params, use_tqdm=False, lora_request=adapter)[0]
                    for (prompt, params), adapter in zip(work, adapters, strict=True)
                ]
            return [[choice.token_ids for choice in output.outputs] for output in outputs]

    together = run(True)
    assert run(False) == together
    assert run(True, speculative_config={"method": "ngram", "adaptive": False}) == together


def test_after_an_engine_has_ended(served: Served) -> None:
    """A request that continues on another engine, with the tokens so far: the rest is the same."""
    adapter = served.adapters[1]
    with engine(served) as llm:
        (whole,) = llm.generate([served.prompts[2]], PARAMS, use_tqdm=False, lora_request=adapter)
        tokens = whole.outputs[0].token_ids
    with engine(served) as llm:
        (request,) = llm._adapted([llm._requests.request(_prompt(served.prompts[2]), PARAMS, 0)], adapter)
        box: list[Any] = []
        llm._submit(msgspec.structs.replace(request, begun=[tokens[:5]]), box)
        found: list[int] = []
        while not found or len(found) < NUM_TOKENS - 5:
            found += [token for delta in llm._next(box) for token in delta.token_ids]
        assert tokens[:5] + found == tokens


def _prompt(ids: list[int]) -> Any:
    from octavo.offline.prompts import read_prompt

    return read_prompt(ids)


def test_a_budget_for_fewer_adapters_than_are_used(served: Served) -> None:
    """With memory for the largest alone, requests wait for each other, and get the same answers."""
    adapters = mix(served)
    with engine(served) as llm:
        expected = scored(llm, served.prompts, adapters)
        assert llm._loop.adapters is not None
        sizes = [one.num_bytes for one in llm._loop.adapters._adapters.values()]
    with engine(served, lora_memory=max(sizes)) as llm:
        assert scored(llm, served.prompts, adapters) == expected
        traffic = llm._loop.adapters
        assert isinstance(traffic, AdapterTraffic)
        assert traffic.stats.dropped >= 3 and traffic.state().num_bytes <= max(sizes)
    with engine(served, max_loras=1) as llm:
        assert scored(llm, served.prompts, adapters) == expected


@pytest.mark.parametrize("with_tokens", [False, True])
def test_plans_are_made_again_from_a_recording(served: Served, tmp_path: Path, with_tokens: bool) -> None:
    """With prefixes of several adapters in the cache, and pages that run out."""
    adapters = mix(served)
    pages = 28 * 4 * 2 * 2 * 2 * 8 * 4
    with engine(served, kv_cache_memory_bytes=pages, speculative_config={"method": "none"}) as llm:
        header = header_of(llm.report, True, with_tokens)
        llm._loop.record(Recorder(Segments(tmp_path, "1", 2**24), header, RecordingRing()))
        for _ in range(2):
            scored(llm, served.prompts, adapters)
        assert llm._loop.scheduler.num_preemptions > 0
    replay = Replay(read(tmp_path))
    for _ in replay.follow():
        pass
    assert replay.num_steps > 20 and replay.num_same == replay.num_steps


def test_gguf_adapters(served: Served, tmp_path: Path) -> None:
    """The matrices of a PEFT folder as llama.cpp's converter writes them: the rows of q and k are interleaved."""
    adapter = served.adapters[3]
    assert adapter is not None
    tensors = _gguf_tensors(Path(adapter.path), num_heads=4, num_kv_heads=2)
    metadata = {
        "general.type": "adapter",
        "general.architecture": "llama",
        "adapter.type": "lora",
        "adapter.lora.alpha": 20.0,
    }
    path = write_gguf(tmp_path / "d.gguf", metadata, tensors)
    with engine(served) as llm:
        expected = scored(llm, served.prompts[:2], [adapter] * 2)
        assert scored(llm, served.prompts[:2], [LoRARequest("d", 1, str(path))] * 2) == expected


def _gguf_tensors(folder: Path, num_heads: int, num_kv_heads: int) -> list[Packed]:
    from safetensors.torch import load_file

    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    found = []
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        parts = name.split(".")
        layer, module, side = parts[4], parts[6], parts[7]
        if side == "lora_B" and module in ("q_proj", "k_proj"):
            heads = num_heads if module == "q_proj" else num_kv_heads
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        data = tensor.contiguous().numpy().tobytes()
        found.append(Packed(f"blk.{layer}.{names[module]}.weight.{side.lower()}", tuple(tensor.shape), "F32", data))
    return found


# ── mistakes ────────────────────────────────────────────────────────────────────────────────────────


def test_adapters_of_another_model(served: Served, tmp_path: Path) -> None:
    weights = weights_of(Path(served.folder))
    wide = {name: torch.zeros(40, 40) for name in weights if "q_proj" in name}
    deep = {"model.layers.7.self_attn.q_proj.weight": torch.zeros(32, 32)}
    head = {"lm_head.weight": torch.zeros(VOCABULARY, 32)}
    cases = [
        (write_peft(tmp_path / "wide", wide), r"40 × 40, and this model's has 32 × 32.*its base is tiny"),
        (write_peft(tmp_path / "deep", deep), "no matrix of attention or MLP"),
        (write_peft(tmp_path / "head", head, targets=("lm_head",)), "lm_head, which is no matrix"),
    ]
    for folder, message in cases:
        with pytest.raises(ConfigError, match=message):
            engine(served, lora_modules=f"x={folder}")
    with engine(served) as llm:  # the same at run time ends that request alone
        with pytest.raises(InvalidRequest, match="40 × 40"):
            llm.generate(
                [served.prompts[0]], PARAMS, use_tqdm=False, lora_request=LoRARequest("x", 1, str(cases[0][0]))
            )
        assert scored(llm, [served.prompts[0]], [served.adapters[0]])


def test_files_that_change_or_vanish(served: Served, tmp_path: Path) -> None:
    weights = weights_of(Path(served.folder))
    folder = write_peft(tmp_path / "a", weights)
    with engine(served) as llm:
        (request,) = llm._adapted(
            [llm._requests.request(_prompt(served.prompts[0]), PARAMS, 0)], LoRARequest("a", 1, str(folder))
        )
        write_peft(folder, weights, seed=9, alpha=17)
        box: list[Any] = []
        llm._submit(request, box)
        (delta,) = llm._next(box)
        assert delta.finish is not None and "have changed since it was registered" in (delta.finish.message or "")
        (folder / "adapter_model.safetensors").unlink()
        with pytest.raises(InvalidRequest, match=r"holds no adapter_model\.safetensors"):
            llm.generate([served.prompts[0]], PARAMS, use_tqdm=False, lora_request=LoRARequest("a", 1, str(folder)))
        assert llm._loop.adapters is not None and not llm._loop.adapters.num_held


def test_numbers_that_are_not_finite(served: Served, tmp_path: Path) -> None:
    with engine(served) as llm:
        for name, side, value in (("a", "A", "nan"), ("b", "B", "inf"), ("c", "A", "-inf")):
            folder = write_peft(tmp_path / name, weights_of(Path(served.folder)), dtype=torch.bfloat16)
            file = folder / "adapter_model.safetensors"
            tensors = load_file(file)
            next(matrix for at, matrix in tensors.items() if f"lora_{side}" in at)[1, 2] = float(value)
            save_file(tensors, file)
            with pytest.raises(InvalidRequest, match="not finite"):
                llm.generate(
                    [served.prompts[0]], PARAMS, use_tqdm=False, lora_request=LoRARequest(name, 1, str(folder))
                )


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_loading_yields_to_steps(served: Served) -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with engine(served) as llm:
        llm.generate([served.prompts[0]], PARAMS, use_tqdm=False, lora_request=served.adapters[0])
        found = {
            thread.name.rsplit("_", 1)[0]: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0)
            for thread in threading.enumerate()
        }
    assert found["octavo-adapters"] == max(10, before)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_options(served: Served) -> None:
    adapter = served.adapters[1]
    with (
        engine(served, enable_lora=False, lora_memory="auto") as llm,
        pytest.raises(InvalidRequest, match="enable_lora"),
    ):
        llm.generate([served.prompts[0]], PARAMS, use_tqdm=False, lora_request=adapter)
    with engine(served, max_lora_rank=8) as llm:
        with pytest.raises(InvalidRequest, match="rank 16; the limit is 8"):
            llm.generate([served.prompts[0]], PARAMS, use_tqdm=False, lora_request=adapter)
        with pytest.raises(InvalidRequest, match="2 prompts need 2 adapters"):
            llm.generate(served.prompts[:2], PARAMS, use_tqdm=False, lora_request=[None])
    with engine(served, lora_memory=1000) as llm, pytest.raises(InvalidRequest, match=r"--lora-memory"):
        llm.generate([served.prompts[0]], PARAMS, use_tqdm=False, lora_request=adapter)
    for options, message in (
        ({"lora_modules": "x"}, "not name=path"),
        ({"lora_modules": "x=a,x=b"}, "twice"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "--max-cpu-loras 2 is below --max-loras 4"),
        ({"enable_lora": False, "lora_modules": "x=a"}, "give --enable-lora"),
        ({"max_lora_rank": 257}, "between 1 and 256"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine(served, **options)


def test_a_client_cannot_choose_an_adapter_by_its_parameters(served: Served) -> None:
    """`adapter` of the parameters is the engine's: what else is there does nothing."""
    with engine(served) as llm:
        expected = scored(llm, [served.prompts[0]], [None])
        request = llm._requests.request(_prompt(served.prompts[0]), PARAMS, 0)
        params = msgspec.structs.replace(request.params, adapter="no such")
        box: list[Any] = []
        llm._submit(msgspec.structs.replace(request, params=params), box)
        tokens: list[int] = []
        while len(tokens) < NUM_TOKENS:
            tokens += [token for delta in llm._next(box) for token in delta.token_ids]
        assert tokens == [next(iter(scores)) for scores in expected[0]]


def test_families_of_other_shapes(tmp_path: Path) -> None:
    """Fused q, k and v whose rows are arranged anew (GPT-NeoX), fused gate and up (Phi-3), and an MLP with an activation."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Phi3Config, Phi3ForCausalLM

    common = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    common |= {"intermediate_size": 64, "max_position_embeddings": 128, "initializer_range": 0.4}
    families = {
        "neox": (
            GPTNeoXForCausalLM,
            GPTNeoXConfig(**common),
            ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        ),
        "phi3": (
            Phi3ForCausalLM,
            Phi3Config(**common, num_key_value_heads=2, pad_token_id=0),
            ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
        ),
    }
    prompt = [5, 6, 7, 8, 9, 40, 41]
    for name, (kind, config, targets) in families.items():
        torch.manual_seed(3)
        model = kind(config).eval().float()
        model.save_pretrained(tmp_path / name)
        write_byte_tokenizer(tmp_path / name)
        weights = weights_of(tmp_path / name)
        folder = write_peft(tmp_path / f"{name}-adapter", weights, rank=6, targets=targets)
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 6
        model.load_state_dict(merged(weights, folder), strict=False)
        with LLM(str(tmp_path / name), enable_lora=True, dtype="float32", kv_cache_memory_bytes=2**21) as llm:
            (output,) = llm.generate([prompt], PARAMS, use_tqdm=False, lora_request=LoRARequest("x", 1, str(folder)))
        choice = output.outputs[0]
        expected = reference(model, prompt, choice.token_ids)
        for at, (token, scores) in enumerate(zip(choice.token_ids, choice.logprobs or [], strict=True)):
            assert scores[token].logprob == pytest.approx(float(expected[at, token]), abs=2e-4), name
