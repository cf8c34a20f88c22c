"""LLM: one engine, several callers, interruptions, and mistakes."""

import os
import signal

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, ContextTooLong, EngineDead, InvalidRequest
from tests.doubles import write_byte_tokenizer
from tests.small_llama import small_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("model")
    small_llama(300, bos_token_id=None, eos_token_id=None).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return str(folder)


@pytest.fixture
def llm(folder):
    with LLM(folder, kv_cache_memory_bytes=2**21, max_num_seqs=8) as llm:
        yield llm


def greedy(num_tokens: int = 12, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **more)


def test_two_streams_and_a_batch_at_once(llm):
    want = [output.outputs[0].text for output in llm.generate(["one", "two", "three"], greedy(), use_tqdm=False)]
    first, second = llm.stream("one", greedy()), llm.stream("two", greedy())
    texts = [next(first).text, next(second).text]
    (third,) = llm.generate("three", greedy(), use_tqdm=False)
    texts[0] += "".join(delta.text for delta in first)
    texts[1] += "".join(delta.text for delta in second)
    assert [*texts, third.outputs[0].text] == want
    assert llm._loop.scheduler.is_idle


def test_leaving_a_stream_frees_its_pages(llm):
    stream = llm.stream("one", greedy(100))
    next(stream)
    stream.close()
    assert llm._loop.scheduler.is_idle and llm._loop.scheduler.cache.pool.num_used == 0


def test_ctrl_c_in_the_middle_of_a_step_leaves_the_engine_usable(llm, monkeypatch):
    want = llm.generate(["one", "two"], greedy(), use_tqdm=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without this handler
    runner_submit, num_steps = llm._loop.executor.submit, 0

    def interrupted_submit(plan):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        runner_submit(plan)

    monkeypatch.setattr(llm._loop.executor, "submit", interrupted_submit)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], greedy(), use_tqdm=False)
    assert num_steps == 3 and llm._loop.scheduler.is_idle
    again = llm.generate(["one", "two"], greedy(), use_tqdm=False)
    assert [output.outputs for output in again] == [output.outputs for output in want]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_after_a_failed_step_the_engine_says_so(llm, monkeypatch):
    def fail(plan):
        raise RuntimeError("out of paper")

    monkeypatch.setattr(llm._loop.executor, "submit", fail)
    with pytest.raises(RuntimeError, match="out of paper"):
        llm.generate("one", greedy(), use_tqdm=False)
    with pytest.raises(EngineDead, match="out of paper"):
        llm.generate("one", greedy(), use_tqdm=False)


def test_stop_strings_and_choices(llm):
    (whole,) = llm.generate("one", greedy(24), use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[4:6]
    (cut,) = llm.generate("one", greedy(24, stop=stop), use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert llm._loop.scheduler.is_idle


def test_offline_requests_repeat_from_run_to_run(folder):
    def run(seed: int) -> list[list[int]]:
        with LLM(folder, kv_cache_memory_bytes=2**21, seed=seed) as llm:
            outputs = llm.generate(["one", "one"], SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

    first = run(2**62)
    assert first == run(2**62) and first != run(1) and first[0] != first[1]


def test_mistakes_are_named(llm, folder):
    with pytest.raises(InvalidRequest, match="mixes token ids"):
        llm.generate([1, "hello", 2], greedy())
    with pytest.raises(InvalidRequest, match="2 prompts need one or 2"):
        llm.generate(["a", "b"], [greedy()] * 3)
    with pytest.raises(ContextTooLong, match="256"):
        llm.generate("x" * 400, greedy())
    with pytest.raises(InvalidRequest, match="n must be 1"):
        llm.stream("x", greedy(n=2))
    with pytest.raises(InvalidRequest, match="messages"):
        llm.chat([])
    with pytest.raises(ConfigError, match="unknown option 'max_len'; the options are attention_backend, "):
        LLM(folder, max_len=3)
    with pytest.raises(ConfigError, match=r"unknown option 'max_modle_len'; did you mean 'max_model_len'\?"):
        LLM(folder, max_modle_len=3)
    with pytest.raises(ConfigError, match="max_model_len: '8kk' is not a count"):
        LLM(folder, max_model_len="8kk")
    with pytest.raises(
        ConfigError, match="enable_sleep_mode=True is not offered: a server of one model keeps it loaded"
    ):
        LLM(folder, enable_sleep_mode=True)
    with pytest.raises(ConfigError, match="port is an option of the server"):
        LLM(folder, port=3)
    with pytest.raises(ConfigError, match="beyond the model's context"):
        LLM(folder, max_model_len=10_000)


def test_options_go_by_their_flags_names_too(folder):
    with LLM(folder, block_size=8, kv_cache_memory_bytes=2**21) as llm:
        assert llm.report.page_size == 8
