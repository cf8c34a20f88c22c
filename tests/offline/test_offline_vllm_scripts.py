"""Scripts written for vLLM's Python API, with the import changed: options, prompts, parameters, outputs, tokenizer, asyncio."""

import asyncio
import dataclasses
import re
import warnings
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch

import octavo
from octavo import LLM, AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams
from octavo.errors import ConfigError, ContextTooLong, EngineDead, InvalidRequest, Unsupported
from octavo.offline.vllm_names import MISSING
from tests.doubles import write_byte_tokenizer
from tests.small_llama import small_llama

SMALL = {"kv_cache_memory_bytes": "2M", "max_num_seqs": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("model")
    small_llama(300, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(model=folder, **SMALL) as llm:
        yield llm


def greedy(num_tokens: int = 8, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **more)


def texts_of(outputs: object) -> list[str]:
    return [output.outputs[0].text for output in outputs]  # type: ignore[attr-defined]


# ── options ──


def test_the_options_of_a_vllm_script(folder: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm = LLM(
            model=folder, tokenizer=None, tokenizer_mode="auto", trust_remote_code=True, tensor_parallel_size=1, dtype="float",
            quantization=None, revision=None, seed=0, gpu_memory_utilization=0.9, swap_space=0, cpu_offload_gb=0,
            enforce_eager=True, disable_custom_all_reduce=False, max_model_len="1k", enable_lora=False, block_size=16, **SMALL,
        )  # fmt: skip
    with llm:
        assert llm.config.model.max_model_len == 1024 and llm.config.cache.kv_cache_memory_bytes == 2 * 2**20
        assert llm.config.model.dtype == "float32" and llm.report.max_model_len == 1024
    notes = [warning for warning in caught if warning.category is UserWarning]
    words = [str(note.message).split(" has no effect")[0] for note in notes]
    assert words == ["tokenizer_mode", "trust_remote_code"]
    assert {note.filename for note in notes} == {__file__}  # the line of the script


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"speculative_config": {"method": "medusa"}}, "--speculative-config: the method 'medusa' is not supported: use"),
        ({"max_model_len": "8kk"}, "max_model_len: '8kk' is not a count"),
        ({"kv_cache_memory_bytes": "64MB"}, "kv_cache_memory_bytes: '64MB' is not a size"),
        ({"max_num_seq": 8}, "unknown option 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"gpu_memory_utilisation": 0.5}, "unknown option 'gpu_memory_utilisation'; did you mean 'gpu_memory_utilization'?"),
        ({"api_key": "x"}, "api_key is an option of the server"),
    ],
)  # fmt: skip
def test_options_that_do_not_work_say_so(folder: str, options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(folder, **options)
    assert caught.value.message.startswith(problem)


def test_the_models_own_settings_can_be_replaced(folder: str, tmp_path: Path) -> None:
    with LLM(
        folder, hf_overrides={"max_position_embeddings": 128}, override_generation_config={"top_k": 7}, **SMALL
    ) as llm:
        assert llm.report.max_model_len == 128 and llm.get_default_sampling_params().top_k == 7
        assert "settings" in llm.report.fingerprint
        output = llm.generate("ab", greedy(), use_tqdm=False)
    with LLM(folder, served_model_name=["a", "b"], **SMALL) as llm:
        assert llm.model_name == "a" and "settings" not in llm.report.fingerprint
        assert texts_of(llm.generate("ab", greedy(), use_tqdm=False)) == texts_of(output)
    for options, problem in (
        ({"hf_overrides": {"model_type": "gemma3"}}, "--hf-overrides cannot set model_type"),
        ({"hf_overrides": "[]"}, "--hf-overrides must be a JSON object"),
        ({"hf_overrides": {"a": object()}}, "hf_overrides is not JSON"),
        ({"hf_overrides": {"num_attention_heads": "four"}}, "num_attention_heads"),
    ):
        with pytest.raises(ConfigError, match=problem):
            LLM(folder, **options)


# ── prompts and outputs ──


def test_every_form_of_a_prompt_gives_the_same(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("one")
    one = {"sampling_params": greedy(), "use_tqdm": False}
    want = texts_of(llm.generate("one", **one))
    for outputs in (
        llm.generate(["one"], greedy(), use_tqdm=False),
        llm.generate({"prompt": "one"}, **one),
        llm.generate([{"prompt": "one"}], **one),
        llm.generate({"prompt_token_ids": ids}, **one),
        llm.generate(prompt_token_ids=[ids], **one),
        llm.generate(prompt_token_ids=ids, **one),
        llm.generate(ids, **one),
        llm.generate([ids], **one),
    ):
        assert texts_of(outputs) == want and outputs[0].prompt_token_ids == ids
    for numbers in (np.array(ids), [np.int32(token) for token in ids], tuple(ids)):
        (output,) = llm.generate([numbers], **one)
        assert output.prompt_token_ids == ids and {type(token) for token in output.prompt_token_ids} == {int}
    mixed = llm.generate(["one", {"prompt_token_ids": ids}, ids], **one)
    assert texts_of(mixed) == want * 3 and [output.prompt for output in mixed] == ["one", None, None]


@pytest.mark.parametrize(
    ("prompts", "more", "problem"),
    [
        (None, {}, "prompts is missing"),
        ("a", {"prompt_token_ids": [1]}, "give either prompts or prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, {}, "multi_modal_data of a prompt is not supported"),
        ({}, {}, "a prompt must have prompt or prompt_token_ids"),
        ({"prompt": 3}, {}, "prompt must be a text"),
        ([[1, "x"]], {}, "a prompt of token ids must be a list of whole numbers"),
        ([1, "x"], {}, "mixes token ids"),
        (None, {"prompt_token_ids": [["a"]]}, "prompt_token_ids must be a list of ids"),
        ("a", {"sampling_params": {"temperature": 0}}, "sampling_params must be SamplingParams"),
        ("a", {"lora_request": "x"}, "lora_request needs LLM"),
        ([3.5], {}, "a prompt must be a text or token ids, got float"),
    ],
)
def test_mistaken_prompts_are_named(llm: LLM, prompts: object, more: dict[str, object], problem: str) -> None:
    with pytest.raises((InvalidRequest, Unsupported), match=problem):
        llm.generate(prompts, **more)  # type: ignore[arg-type]


def test_the_fields_of_an_output(llm: LLM) -> None:
    params = greedy(4, logprobs=2, prompt_logprobs=1, n=2)
    (output,) = llm.generate("abc", params, use_tqdm=False)
    assert output.finished and output.prompt == "abc" and output.lora_request is None and output.encoder_prompt is None
    assert output.metrics is not None and output.metrics.num_generation_tokens == 8
    assert output.metrics.first_token_latency > 0 and output.metrics.first_token_ts <= output.metrics.last_token_ts
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 3
    assert output.prompt_logprobs[1][output.prompt_token_ids[1]].decoded_token == "b"
    for index, choice in enumerate(output.outputs):
        assert choice.index == index and choice.finished() and choice.finish_reason == "length"
        assert len(choice.logprobs) == 4
        chosen = [entry[token] for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)]
        assert all(entry.rank == 1 for entry in chosen) and all(len(entry) == 2 for entry in choice.logprobs)
        assert choice.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))
    (plain,) = llm.generate("abc", greedy(4), use_tqdm=False)
    assert plain.prompt_logprobs is None and plain.outputs[0].logprobs is None
    assert plain.outputs[0].cumulative_logprob is None


def test_parameters_that_only_concern_the_output(llm: LLM) -> None:
    (cut,) = llm.generate("abcdef", greedy(truncate_prompt_tokens=2), use_tqdm=False)
    (same,) = llm.generate("ef", greedy(), use_tqdm=False)
    assert cut.prompt_token_ids == same.prompt_token_ids and cut.outputs[0].text == same.outputs[0].text
    (ids,) = llm.generate("ef", greedy(detokenize=False), use_tqdm=False)
    assert ids.outputs[0].token_ids == same.outputs[0].token_ids and ids.outputs[0].text == ""
    (fits,) = llm.generate("x" * 3000, greedy(8, truncate_prompt_tokens=-1), use_tqdm=False)
    assert len(fits.prompt_token_ids) == llm.report.max_model_len - 8
    for options, problem in (
        ({"detokenize": False, "stop": ["x"]}, "need detokenize"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1"),
        ({"output_kind": "delta"}, "output_kind must be a RequestOutputKind"),
        ({"detokenize": 1}, "detokenize must be True or False"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            SamplingParams(**options)


def test_chat_with_what_a_template_takes(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokenizer = llm.get_tokenizer()
    (plain,) = llm.chat(messages, greedy(), use_tqdm=False)
    assert plain.prompt == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert plain.prompt_token_ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    (turn,) = llm.chat(messages, greedy(), False, add_generation_prompt=False)
    assert plain.prompt.startswith(turn.prompt) and plain.prompt != turn.prompt
    began = [*messages, {"role": "assistant", "content": "well"}]
    (open_,) = llm.chat(began, greedy(), use_tqdm=False, continue_final_message=True, add_generation_prompt=False)
    assert open_.prompt.endswith("well")
    own = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mood }}"
    (other,) = llm.chat(messages, greedy(), False, chat_template=own, chat_template_kwargs={"mood": "!"})
    assert other.prompt == "[hi]!"
    (several, second) = llm.chat([messages, began], greedy(), use_tqdm=False)
    assert several.prompt == plain.prompt and "well" in second.prompt
    with pytest.raises(InvalidRequest, match="needs a last message of the assistant"):
        llm.chat(messages, greedy(), continue_final_message=True)
    with pytest.raises(InvalidRequest, match="must not set tools"):
        llm.chat(messages, greedy(), chat_template_kwargs={"tools": []})


def test_the_tokenizer_has_the_methods_that_scripts_use(llm: LLM, folder: str) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("héllo", add_special_tokens=False)
    assert tokenizer.decode(ids) == "héllo" and tokenizer.batch_decode([ids, ids[:1]]) == ["héllo", "h"]
    assert tokenizer("ab") == {"input_ids": tokenizer.encode("ab"), "attention_mask": [1, 1]}
    assert len(tokenizer(["ab", "c"])["input_ids"]) == 2
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize("ab")) == tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == tokenizer.eos_token
    assert tokenizer.eos_token_id in tokenizer.all_special_ids and len(tokenizer) == tokenizer.vocab_size
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "héllo"


# ── asyncio ──


@pytest.fixture
def engine(folder: str) -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, enforce_eager=True, **SMALL))
    yield engine
    engine.shutdown()
    engine.shutdown()  # a second time does nothing


async def test_streams_of_every_kind_say_the_same(engine: AsyncLLM, llm: LLM) -> None:
    params = greedy(12, logprobs=1, n=2)
    (want,) = llm.generate("one", params, use_tqdm=False)

    async def read(kind: RequestOutputKind) -> list[object]:
        wanted = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, n=2, output_kind=kind)
        return [output async for output in engine.generate("one", wanted, request_id=kind.name)]

    whole, deltas, final = await asyncio.gather(*map(read, RequestOutputKind))
    assert len(final) == 1 and len(whole) > 2 and len(deltas) > 2
    for outputs in (whole, deltas, final):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for last in (whole[-1], final[-1]):
        assert [dataclasses.astuple(choice) for choice in last.outputs] == [
            dataclasses.astuple(choice) for choice in want.outputs
        ]
    assert len(whole[0].outputs[0].token_ids) < len(whole[1].outputs[0].token_ids), (
        "an output does not grow once it is given"
    )
    for index, choice in enumerate(want.outputs):
        parts = [part for output in deltas for part in output.outputs if part.index == index]
        assert "".join(part.text for part in parts) == choice.text
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
        assert [entry for part in parts for entry in part.logprobs] == choice.logprobs
        assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]


async def test_a_chat_a_stop_string_and_the_best_of_several(engine: AsyncLLM, llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (want,) = llm.chat(messages, greedy(), use_tqdm=False)
    *_, last = [output async for output in engine.chat(messages, greedy())]
    assert last.outputs[0].text == want.outputs[0].text and last.prompt == want.prompt
    stop = want.outputs[0].text[3:5]
    *_, cut = [output async for output in engine.chat(messages, greedy(24, stop=[stop]))]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    drawn = {"temperature": 1.0, "seed": 5, "n": 1, "best_of": 3, "max_tokens": 6, "ignore_eos": True}
    (best,) = [output async for output in engine.generate("one", SamplingParams(**drawn))]
    (same,) = llm.generate("one", SamplingParams(**drawn), use_tqdm=False)
    assert best.outputs[0].token_ids == same.outputs[0].token_ids


async def test_leaving_and_aborting(engine: AsyncLLM) -> None:
    async with aclosing(engine.generate("one", greedy(1000), request_id="left")) as outputs:
        async for _ in outputs:
            break
    seen = []
    async for output in engine.generate("one", greedy(1000), request_id="ended"):
        seen.append(output)
        if len(seen) == 2:
            with pytest.raises(InvalidRequest, match="'ended' is in use"):
                await anext(engine.generate("two", greedy(), request_id="ended"))
            await engine.abort("ended")
    assert seen[-1].finished and seen[-1].outputs[0].finish_reason == "abort"
    await engine.abort("nothing")
    await engine.check_health()
    assert engine._engine.loop.scheduler.is_idle and await engine.reset_prefix_cache() >= 0
    assert (await engine.get_tokenizer()).vocab_size


async def test_mistakes_and_the_end(engine: AsyncLLM) -> None:
    with pytest.raises(ContextTooLong, match="prompt has 20000 tokens; the context holds 2048"):
        await anext(engine.generate("x" * 20_000, greedy()))
    with pytest.raises(InvalidRequest, match="at most 256 characters"):
        await anext(engine.generate("x", greedy(), request_id="i" * 300))
    running = engine.generate("one", greedy(2000))
    await anext(running)
    engine.shutdown()
    with pytest.raises(EngineDead, match="was shut down"):
        [output async for output in running]
    with pytest.raises(EngineDead, match="was shut down"):
        await anext(engine.generate("one", greedy()))


def test_another_event_loop_is_refused(engine: AsyncLLM) -> None:
    async def ask() -> None:
        [output async for output in engine.generate("one", greedy())]

    asyncio.run(ask())
    with pytest.raises(EngineDead, match="belongs to another event loop"):
        asyncio.run(ask())


def test_the_names_are_where_scripts_import_them(tmp_path: Path) -> None:
    import octavo

    for name in octavo.__all__:
        assert getattr(octavo, name) is not None


def test_an_unknown_field_of_sampling_params_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"^SamplingParams has no field 'temperture'; did you mean 'temperature'\?$"):
        SamplingParams(temperture=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^SamplingParams has no field 'colour'$"):
        SamplingParams(colour=1, max_tokens=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)  # type: ignore[misc]
    assert SamplingParams(temperature=0.5).temperature == 0.5


def test_what_vllm_has_and_octavo_has_not_is_named(llm: LLM) -> None:
    for name, why in MISSING.items():
        with pytest.raises(AttributeError, match=f"'LLM' object has no attribute '{name}': {re.escape(why)}"):
            getattr(llm, name)
        assert not hasattr(AsyncLLM, name) and not hasattr(LLM, name), f"{name} exists: take it out of the table"
    with pytest.raises(AttributeError, match=r"no attribute 'genrate'$"):
        llm.genrate  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match=r"use StructuredOutputsParams, and SamplingParams\(structured_outputs=…\)"):
        from octavo import GuidedDecodingParams  # type: ignore[attr-defined]  # noqa: F401
    assert not hasattr(octavo, "no_such_name") and not hasattr(octavo, "GuidedDecodingParams")
    with pytest.raises(AttributeError, match="use StructuredOutputsParams"):
        octavo.GuidedDecodingParams  # type: ignore[attr-defined]  # noqa: B018
