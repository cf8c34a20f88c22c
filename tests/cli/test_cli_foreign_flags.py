"""Flags of vLLM, SGLang and llama.cpp: renamed, taken with a note, or refused with a reason."""

import pytest

from octavo.cli.flags import Parser, add_config_flags, config_from
from octavo.config import Config
from octavo.foreign_flags import FOREIGN, VALUES


def parse(*argv: str) -> Config:
    parser = Parser(prog="octavo")
    add_config_flags(parser)
    return config_from(parser.parse_args(argv), {})


def own() -> dict[str, object]:
    parser = Parser(prog="octavo")
    add_config_flags(parser)
    return dict(parser._option_string_actions)


def test_no_flag_of_ours_is_in_the_table_and_every_name_it_leads_to_is_ours() -> None:
    ours = own()
    assert not [name for name in FOREIGN if name in ours]
    for name, flag in FOREIGN.items():
        assert bool(flag.ours) + bool(flag.note) + bool(flag.why) >= 1, name
        assert not flag.ours or flag.ours in ours, name
    assert set(VALUES) <= set(ours)


@pytest.mark.parametrize("name", sorted(name for name, flag in FOREIGN.items() if not flag.ours))
def test_every_foreign_flag_has_its_effect(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = FOREIGN[name]
    value = ["1"] if flag.takes_value else []
    if flag.harmless_values:
        value = [sorted(flag.harmless_values)[0]]
    if flag.note:
        assert parse(name, *value, "--port", "7") == parse("--port", "7")
        assert f"octavo: {name} has no effect: {flag.note}\n" in capsys.readouterr().err
        return
    with pytest.raises(SystemExit):
        parse(name, *value)
    assert capsys.readouterr().err == f"octavo: error: {name} is not offered: {flag.why}\n"


def test_renamed_flags_set_ours() -> None:
    config = parse("-m", "a.gguf", "-c", "4096", "-t", "2", "-np", "8", "-ngl", "99", "-ctk", "q8_0")
    assert (config.model.model, config.model.max_model_len, config.parallel.cpu_threads) == ("a.gguf", 4096, 2)
    assert (config.scheduler.max_num_seqs, config.cache.kv_cache_dtype) == (8, "int8")
    assert config.parallel.tensor_parallel_size == 1
    config = parse("--model-path=m", "--mem-fraction-static=0.5", "--disable-radix-cache", "-q", "fp8", "-tp", "2")
    assert (config.model.model, config.cache.gpu_memory_utilization, config.cache.enable_prefix_caching) == (
        "m",
        0.5,
        False,
    )
    assert (config.model.quantization, config.parallel.tensor_parallel_size) == ("fp8", 2)
    assert parse("--max_num_queued_reqs", "3").scheduler.max_waiting_requests == 3


def test_values_of_other_servers(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse("--dtype=half", "--quantization", "awq_marlin", "--load-format", "safetensors")
    assert (config.model.dtype, config.model.quantization, config.model.load_format) == ("float16", "auto", "auto")
    assert capsys.readouterr().err == (
        "octavo: --quantization awq_marlin means auto here: the checkpoint says how it is quantised\n"
        "octavo: --load-format safetensors means auto here: the model's files decide how weights are read\n"
    )


def test_values_that_would_change_something_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--tokenizer-mode", "auto") == Config()
    with pytest.raises(SystemExit):
        parse("--distributed-executor-backend", "ray")
    assert "--distributed-executor-backend ray is not offered: a server runs on one machine" in capsys.readouterr().err


def test_the_off_form_of_what_is_not_offered_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--no-enable-sleep-mode", "--no-async-scheduling") == Config()
    assert capsys.readouterr().err.count("has no effect") == 2


def test_a_value_is_not_taken_for_the_model() -> None:
    assert parse("--compilation-config", '{"level": 3}', "org/model").model.model == "org/model"
    assert parse("--trust-remote-code", "org/model").model.model == "org/model"


@pytest.mark.parametrize(
    ("given", "suggested"), [("--gpu-memory-utilisation", "--gpu-memory-utilization"), ("--zzz", "")]
)
def test_a_suggestion_is_close(given: str, suggested: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(given, "1")
    error = capsys.readouterr().err
    assert (
        error == f"octavo: error: unknown flag {given}" + (f"; did you mean {suggested}?" if suggested else "") + "\n"
    )
