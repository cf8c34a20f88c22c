"""Flags of vLLM, SGLang and llama.cpp: renamed, taken with a note, or refused with a reason."""

import functools
import json
import re
from pathlib import Path

import pytest

import octavo
from octavo.cli.flags import Parser, add_config_flags, add_settings_file, config_from
from octavo.cli.main import build_parser
from octavo.config import Config
from octavo.foreign_flags import (
    FOREIGN,
    FOREIGN_COMMANDS,
    FOREIGN_VARIABLES,
    VALUES,
    foreign_variables,
    translate,
    translate_options,
)
from scripts import llama_cpp_flags
from scripts.vllm_flags import flags_in


@functools.cache  # parsing changes nothing of it
def parser() -> Parser:
    made = Parser(prog="octavo")
    add_settings_file(made)
    add_config_flags(made)
    return made


def parse(*argv: str) -> Config:
    return config_from(parser().parse_args(argv), {})


def test_no_flag_of_ours_is_in_the_table_and_every_name_it_leads_to_is_ours() -> None:
    ours = parser()._option_string_actions
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
    if flag.harmless_members:
        value = [json.dumps(dict.fromkeys(flag.harmless_members, "any"))]
    if flag.note:
        assert parse(name, *value, "--port", "7") == parse("--port", "7")
        assert f"octavo: {name} has no effect: {flag.note}\n" in capsys.readouterr().err
        return
    with pytest.raises(SystemExit):
        parse(name, *value)
    assert capsys.readouterr().err == f"octavo: error: {name} is not offered: {flag.why}\n"


def flags_of(file: str) -> dict[str, str]:
    lines = (Path(__file__).parents[1] / "data" / file).read_text().splitlines()
    pairs = [line.partition(" ") for line in lines if not line.startswith("#")]
    return {name: kind for name, _, kind in pairs}


@pytest.mark.parametrize("file", ["vllm_flags.txt", "llama_cpp_flags.txt"])
def test_every_flag_of_theirs_is_known_and_takes_a_value_where_it_does_there(file: str) -> None:
    """The lists are made from their own sources (scripts/vllm_flags.py, scripts/llama_cpp_flags.py). A flag that took a value too many
    would swallow the model."""
    ours, listed = parser()._option_string_actions, flags_of(file)
    assert len(listed) > 300
    for name, kind in listed.items():
        negated = name.startswith("--no-") and "--" + name[5:] in FOREIGN  # these have no effect and say so
        assert name in ours or name in FOREIGN or negated, f"{name} has no fate"
        takes_value = ours[name].nargs != 0 if name in ours else FOREIGN[name].takes_value if name in FOREIGN else False
        assert takes_value == (kind == "value"), name


@pytest.mark.parametrize("name", sorted(name for name in FOREIGN if name.startswith("--") and "." not in name))
def test_the_negation_of_a_flag_never_does_what_the_flag_does(name: str) -> None:
    """It does the opposite, has no effect, or there is none."""
    own = parser()._option_string_actions
    negated = "--no-" + name[2:]
    if negated in own or negated in FOREIGN:
        return
    arguments, notes, problem = translate([negated], own, FOREIGN)
    flag = FOREIGN[name]
    opposite = "--" + flag.ours[5:] if flag.ours.startswith("--no-") else "--no-" + flag.ours[2:]
    assert arguments == ([opposite] if flag.ours and not problem else []) and bool(arguments or notes) is not bool(
        problem
    )


def test_negations_of_switches() -> None:
    assert parse("--cors-credentials", "--no-cors-credentials").server.allow_credentials is False
    assert parse("--no-disable-radix-cache").cache.enable_prefix_caching is True


def test_the_page_for_vllms_users_names_flags_with_their_fates() -> None:
    """It once said for a week that a flag is refused which was served."""
    page = (Path(__file__).parents[2] / "docs" / "get-started" / "from-vllm.md").read_text()
    ours = parser()._option_string_actions

    def row(fate: str) -> list[str]:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {fate}")]
        return re.findall(r"`(--[a-z-]+)", line)

    taken, harmless, refused = row("taken |"), row("taken, with a line"), row("refused, ")
    assert taken and [name for name in taken if name not in ours] == []
    assert harmless and [name for name in harmless if not FOREIGN[name].note] == []
    assert refused and not FOREIGN[refused[0]].note and FOREIGN[refused[0]].why
    assert [name for name in refused[1:] if name not in ours] == [], "the alternative is ours"
    (names,) = re.findall(r"^(`LLM`,.*?)have vLLM's names", page, re.S | re.M)
    assert set(re.findall(r"`(\w+)`", names)) <= set(octavo.__all__)


def test_flags_are_read_from_vllms_sources() -> None:
    engine = """
class EngineArgs:
    enforce_eager: bool = X.enforce_eager
    seed: int | None = None
    def add_cli_args(parser):
        group.add_argument("--enforce-eager", **kwargs["enforce_eager"])
        group.add_argument("--seed", **kwargs["seed"])
        group.add_argument("--tensor-parallel-size", "-tp", **kwargs["tensor_parallel_size"])
"""
    server = """
class FrontendArgs(BaseFrontendArgs):
    disable_docs: bool = False
parser.add_argument("model_tag")
parser.add_argument("--headless", action="store_true")
"""
    assert flags_in(engine, server) == {
        "--disable-docs": "switch", "--enforce-eager": "switch", "--seed": "value", "--tensor-parallel-size": "value", "-tp": "value",
        "--headless": "switch",
    }  # fmt: skip


def test_flags_are_read_from_llama_cpps_sources() -> None:
    source = """
    add_opt(common_arg(
        {"-c", "--ctx-size"}, "N",
        string_format("size of the prompt context (default: %d)", params.n_ctx),
        [](common_params & params, int value) {
            params.n_ctx = value;
        }
    ).set_env("LLAMA_ARG_CTX_SIZE"));
    add_opt(common_arg(
        {"-kvu", "--kv-unified"},
        {"-no-kvu", "--no-kv-unified"},
        "use one buffer",
        [](common_params & params, bool value) {
            params.kv_unified = value;
        }
    ).set_examples({LLAMA_EXAMPLE_SERVER, LLAMA_EXAMPLE_PERPLEXITY}));
    if (is_server) {
        add_opt(common_arg(
            {"--draft"}, "N",
            "the argument has been removed",
            [](common_params & /*params*/, int /*value*/) {
                arg_removed("");
            }
        ));
    }
    add_opt(common_arg(
        {"--color"},
        "of another program",
        [](common_params & params) {
            params.color = true;
        }
    ).set_examples({LLAMA_EXAMPLE_CLI}));
"""
    assert llama_cpp_flags.flags_in(source) == {
        "-c": "value", "--ctx-size": "value", "-kvu": "switch", "--kv-unified": "switch", "-no-kvu": "switch", "--no-kv-unified": "switch",
        "--draft": "value",
    }  # fmt: skip


def test_objects_are_given_by_their_members(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse(
        "--hf-overrides.rope_scaling.factor",
        "4",
        "--hf_overrides.rope_scaling.rope_type=yarn",
        "m",
        "-sc.method",
        "none",
    )
    assert json.loads(config.model.hf_overrides) == {"rope_scaling": {"factor": 4, "rope_type": "yarn"}}
    assert json.loads(config.scheduler.speculative_config) == {"method": "none"}
    assert config.model.model == "m"
    for argv, why in (
        (
            ("--hf-overrides.a", "1", "--hf-overrides", "{}"),
            "--hf-overrides is given whole and by its members (--hf-overrides.a): choose one",
        ),
        (("--hf-overrides.a",), "--hf-overrides.a needs a value"),
        (("--hf-overrides." + "a." * 10_000, "1"), "goes through more than 8 objects"),
        (("--port.a", "1"), "is not a whole number"),
        (("--nothing.a", "1"), "unknown flag --nothing.a"),
    ):
        with pytest.raises(SystemExit):
            parse(*argv)
        assert why in capsys.readouterr().err
    assert json.loads(parse("--hf-overrides.a", "[" * 100_000).model.hf_overrides) == {"a": "[" * 100_000}


@pytest.mark.parametrize("given", [["-O3"], ["-O", "3"], ["-O=3"], ["-O.mode=3"], ["--compilation-config.mode", "3"]])
def test_levels_of_optimisation_have_no_effect(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(*given, "org/model").model.model == "org/model"
    assert "has no effect: nothing goes through torch.compile" in capsys.readouterr().err


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


def test_sampling_flags_of_llama_cpp_are_ours_where_a_command_sends_requests() -> None:
    arguments = build_parser().parse_args(["chat", "--temp", "0.5", "-n", "7", "-m", "a.gguf"])
    assert (arguments.temperature, arguments.max_tokens) == (0.5, 7)


def test_sampling_flags_of_llama_cpp_are_the_defaults_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--temp", "0.7", "--top-p=0.8", "--top-k", "20", "--min-p", "0", "--repeat-penalty", "1.05", "a.gguf")
    kwargs = '{"enable_thinking": false}'
    assert parse("--chat-template-kwargs", kwargs) == parse("--default-chat-template-kwargs", kwargs)
    config = parse(*given)
    assert json.loads(config.model.override_generation_config) == {
        "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05,
    }  # fmt: skip
    assert config.model.model == "a.gguf"
    for argv, why in (
        (("--temp",), "--temp needs a value"),
        (
            ("--temp", "1", "--override-generation-config", "{}"),
            "--override-generation-config is given whole and by its members (--override-generation-config.temperature): choose one",
        ),
        (("--presence-penalty", "1.5"), "--presence-penalty 1.5 is not offered: requests set it"),
        (("-n", "50"), "-n 50 is not offered: requests set max_tokens (llama.cpp's -n)"),
    ):
        with pytest.raises(SystemExit):
            parse(*argv)
        assert why in capsys.readouterr().err
    assert translate_options({"top_k": 3}, set())[2].startswith("top_k=3 is not offered: requests set it")


def test_defaults_of_llama_cpp_are_taken_and_others_say_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    given = (
        "-n",
        "-1",
        "--presence-penalty",
        "0.0",
        "--reasoning-budget",
        "-1",
        "-fit",
        "on",
        "--no-warmup",
        "-dev",
        "none",
        "m",
    )
    assert parse(*given) == parse("--device", "cpu", "m")
    assert capsys.readouterr().err.count("has no effect") == 5
    assert not parse("--no-cache-prompt").cache.enable_prefix_caching
    with pytest.raises(SystemExit):
        parse("--lora", "a.gguf")
    assert "--enable-lora --lora-modules NAME=PATH" in capsys.readouterr().err


def test_values_of_other_servers(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse("--dtype=half", "--quantization", "awq_marlin", "--load-format", "safetensors")
    assert (config.model.dtype, config.model.quantization, config.model.load_format) == ("float16", "auto", "auto")
    assert capsys.readouterr().err == (
        "octavo: --quantization awq_marlin means auto here: the checkpoint says how it is quantised; int4 rounds one that is not\n"
        "octavo: --load-format safetensors means auto here: the model's files decide how weights are read\n"
    )


def test_values_that_would_change_something_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--tokenizer-mode", "auto") == Config()
    with pytest.raises(SystemExit):
        parse("--distributed-executor-backend", "external_launcher")
    assert "--distributed-executor-backend" in capsys.readouterr().err
    assert parse("--distributed-executor-backend", "ray").parallel.uses_ray


@pytest.mark.parametrize(
    ("harmless", "refused"),
    [
        (["--chat-template-content-format", "auto"], ["--chat-template-content-format", "openai"]),
        (["--limit-mm-per-prompt", '{"image": 0, "video": 0}'], ["--limit-mm-per-prompt", '{"image": 0, "video": 1}']),
        (["--limit-mm-per-prompt.image", "0"], ["--limit-mm-per-prompt.image", "2"]),
        (["--structured-outputs-config.backend", "xgrammar"], ["--structured-outputs-config.disable_fallback", "true"]),
        (["--structured-outputs-config={}"], ["--structured-outputs-config={"]),
        (["--nnodes", "1", "--node-rank", "0"], ["--nnodes", "2"]),
        (["--cpu-offload-gb=0"], ["--cpu-offload-gb=4"]),
        (["--response-role", "assistant"], ["--response-role", "bot"]),
    ],
)
def test_what_is_refused_is_taken_where_it_asks_for_what_happens_anyway(
    harmless: list[str], refused: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(*harmless, "org/model") == parse("org/model")
    assert "has no effect: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(*refused, "org/model")
    assert "is not offered: " in capsys.readouterr().err


def test_the_same_holds_for_options_in_python() -> None:
    given = {"limit_mm_per_prompt": {"image": 0}, "structured_outputs_config": {"backend": "xgrammar"}, "nnodes": 1}
    found, notes, refusal = translate_options(given, set())
    assert (found, len(notes), refusal) == ({}, 3, "")
    _, _, refusal = translate_options({"limit_mm_per_prompt": {"image": 1}}, set())
    assert refusal.startswith("limit_mm_per_prompt={'image': 1} is not offered: only text goes in")


def test_the_off_form_of_what_is_not_offered_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--no-enable-sleep-mode", "--no-async-scheduling") == Config()
    assert capsys.readouterr().err.count("has no effect") == 2


def test_a_value_is_not_taken_for_the_model() -> None:
    assert parse("--compilation-config", '{"level": 3}', "org/model").model.model == "org/model"
    assert parse("--trust-remote-code", "org/model").model.model == "org/model"


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("--gpu-memory-utilisation", "--gpu-memory-utilization"),
        ("--zzz", ""),
        ("--tpp", "--tp"),
        ("--steps", ""),
        ("--posts", ""),
    ],
)
def test_a_suggestion_is_close(given: str, suggested: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(given, "1")
    error = capsys.readouterr().err
    assert (
        error == f"octavo: error: unknown flag {given}" + (f"; did you mean {suggested}?" if suggested else "") + "\n"
    )


def test_commands_and_variables_lead_to_what_is_there() -> None:
    commands = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert not set(FOREIGN_COMMANDS) & set(commands)
    for text in FOREIGN_COMMANDS.values():
        assert set(re.findall(r"octavo ([a-z]+)", text)) <= set(commands), text
    flags = commands["serve"]._option_string_actions
    assert not [ours for ours in FOREIGN_VARIABLES.values() if ours not in flags and ours != "OCTAVO_CACHE"]


def test_variables_of_other_servers_are_named() -> None:
    given = dict.fromkeys(("VLLM_API_KEY", "VLLM_USE_V1", "OLLAMA_NUM_PARALLEL", "LLAMA_ARG_CTX_SIZE", "HOME"), "1")
    assert foreign_variables(given, ("VLLM_API_KEY",)) == [
        "the environment variable LLAMA_ARG_CTX_SIZE has no effect here: use --max-model-len",
        "the environment variable OLLAMA_NUM_PARALLEL has no effect here: use --max-num-seqs",
        "the environment variable VLLM_USE_V1 has no effect here",
    ]
