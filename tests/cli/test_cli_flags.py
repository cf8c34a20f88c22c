"""Flags from the config dataclasses: names, kinds, defaults, and the messages for mistakes."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.flags import OFFLINE, Parser, add_config_flags, config_from, count, options_from, size
from octavo.config import AUTO, Config, offline, replace, sections, split_list
from octavo.errors import ConfigError


def parse(*argv: str, only: tuple[str, ...] = (), environ: dict[str, str] | None = None) -> Config:
    parser = Parser(prog="octavo")
    add_config_flags(parser, only)
    return config_from(parser.parse_args(argv), environ or {})


def test_no_flags_give_the_defaults() -> None:
    assert parse() == Config()


def test_every_knob_is_a_flag_and_reads_back_a_value() -> None:
    samples: dict[Any, tuple[str, Any]] = {int: ("7", 7), float: ("0.5", 0.5), str: ("text", "text")}
    for section, cls in sections():
        for knob in dataclasses.fields(cls):
            name = "--" + (knob.metadata["flag"] or knob.name.replace("_", "-")).split(",")[0].lower()
            if knob.type is bool:
                assert getattr(getattr(parse(name), section), knob.name) is True
                assert getattr(getattr(parse(name.replace("--", "--no-")), section), knob.name) is False
                continue
            if knob.metadata["choices"]:
                text, value = (knob.metadata["choices"][-1],) * 2
            elif knob.metadata["kind"] in ("tokens", "bytes"):
                text, value = "2k", 2048
            elif knob.metadata["kind"] == "ms":
                text, value = "75", 75.0
            elif knob.metadata["kind"] == "json":
                text = value = '{"a": 1}'
            else:
                text, value = samples[knob.type]
            # Alone: some flags need another one, which the configuration checks.
            parser = Parser(prog="octavo")
            add_config_flags(parser)
            assert options_from(parser.parse_args([name, text]))[knob.name] == value, name


@pytest.mark.parametrize(
    "argv", [("org/model", "--port", "9000"), ("--port", "9000", "org/model"), ("--model", "org/model", "--port=9000")]
)
def test_model_may_stand_anywhere_or_have_a_flag(argv: tuple[str, ...]) -> None:
    config = parse(*argv)
    assert (config.model.model, config.server.port) == ("org/model", 9000)


def test_two_different_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="two models are named: 'a' and --model 'b'"):
        parse("a", "--model", "b")


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--tp", "-tp", "--tensor_parallel_size"])
def test_aliases_and_underscores(flag: str) -> None:
    assert parse(flag, "2").parallel.tensor_parallel_size == 2


def test_underscores_of_values_are_kept() -> None:
    assert parse("--served_model_name=my_model").model.served_model_name == "my_model"
    assert parse("--served-model-name", "my_model", "some_model").model.model == "some_model"


@pytest.mark.parametrize(("text", "value"), [("8192", 8192), ("8k", 8192), ("8K", 8192), ("1.5k", 1536), ("1m", 2**20)])
def test_counts(text: str, value: int) -> None:
    assert count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("512M", 512 * 2**20), ("2G", 2**31), ("1.5g", 3 * 2**29), ("2GiB", 2**31), ("1000", 1000), ("0.5K", 512)],
)
def test_sizes(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["auto", "AUTO", "-1"])
def test_auto(text: str) -> None:
    assert parse("--max-model-len", text).model.max_model_len == AUTO
    assert parse("--kv-cache-memory-bytes", text).cache.kv_cache_memory_bytes == AUTO


def test_milliseconds() -> None:
    for text, value in (
        ("auto", AUTO),
        ("AUTO", AUTO),
        ("off", 0.0),
        ("Off", 0.0),
        ("0", 0.0),
        ("75", 75.0),
        ("12.5", 12.5),
    ):
        assert parse("--max-inter-token-ms", text).scheduler.max_inter_token_ms == value
    assert parse(environ={"OCTAVO_MAX_INTER_TOKEN_MS": "off"}).scheduler.max_inter_token_ms == 0
    assert parse().scheduler.max_inter_token_ms == AUTO
    with pytest.raises(ConfigError, match=r"--max-inter-token-ms must be between 0 and 1000000000, got -1\.0"):
        parse("--max-inter-token-ms", "-1")
    assert offline(parse()).scheduler.max_inter_token_ms == 0, "no reader waits for the next token"
    assert offline(parse("--max-inter-token-ms", "75")).scheduler.max_inter_token_ms == 75


def test_the_key_comes_from_the_environment_unless_a_flag_brings_one() -> None:
    assert parse(environ={"OCTAVO_API_KEY": "secret"}).server.api_key == "secret"
    assert parse("--api-key", "other", environ={"OCTAVO_API_KEY": "secret"}).server.api_key == "other"


def test_several_keys_from_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n  three \n\n\tfour\n")
    flags = ("--api-key", "one", "--api-key", "two,zwei", "--api-key-file", str(file))
    assert parse(*flags, environ={"OCTAVO_API_KEY": "x"}).server.api_keys == ["one", "two", "zwei", "three", "four"]
    assert parse("--api-key-file", str(file), environ={"OCTAVO_API_KEY": "x"}).server.api_keys == ["three", "four"]
    assert parse(environ={"VLLM_API_KEY": "theirs"}).server.api_keys == ["theirs"]
    assert parse(environ={"VLLM_API_KEY": "theirs", "OCTAVO_API_KEY": "ours"}).server.api_keys == ["ours"]


def test_admin_keys_from_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\nadmin: chief\nadmin:boss\n")
    server = parse("--api-key", "two", "--admin-key", "root", "--api-key-file", str(file)).server
    assert server.admin_keys == ["root", "chief", "boss"] and server.api_keys == ["two", "one", *server.admin_keys]
    server = parse("--api-key", "two", environ={"OCTAVO_ADMIN_KEY": "env"}).server
    assert (server.api_keys, server.admin_keys) == (["two", "env"], ["env"])
    assert parse("--admin-key", "a", environ={"OCTAVO_ADMIN_KEY": "env"}).server.api_keys == ["a"]
    with pytest.raises(ConfigError, match="holds no key"):
        parse("--admin-key", ",")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"", "holds no key"),
        (b"# a\n\n", "holds no key"),
        (b"a,b\n", "comma"),
        (b"\xff", "text file"),
        (b"one\nadmin:  \n", "without a key"),
    ],
)
def test_a_bad_key_file(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as raised:
        parse("--api-key-file", str(file))
    assert "--api-key-file" in str(raised.value) and "\n" not in str(raised.value)


def test_lists_as_vllms_users_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("https://a.example,https://b.example", '["https://a.example", "https://b.example"]'):
        assert split_list(parse("--allowed-origins", text).server.allowed_origins) == [
            "https://a.example",
            "https://b.example",
        ]
    for wrong in ("[", "[1]", '["a,b"]'):
        with pytest.raises(SystemExit):
            parse("--allowed-origins", wrong)
        assert "--allowed-origins" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ssl-keyfile", "k"], "--ssl-keyfile is for TLS: give --ssl-certfile"),
        (["--ssl-ca-certs", "k"], "--ssl-ca-certs is for TLS: give --ssl-certfile"),
        (["--allowed-origins", "*", "--allow-credentials"], "name the origins"),
        (["--max-n", "0"], "--max-n must be at least 1"),
        (["--max-messages", "0"], "--max-messages must be at least 1"),
        (["--stream-interval", "0"], "--stream-interval must be at least 1"),
        (["--sse-keep-alive-interval", "-1"], "--sse-keep-alive-interval must be between 0"),
    ],
)
def test_a_door_half_built_is_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse(*flags)


@pytest.mark.parametrize("text", [",", " ", " , ,", "\t"])
def test_a_lock_without_a_key_is_refused_and_not_left_open(text: str) -> None:
    for options in ({"environ": {"OCTAVO_API_KEY": text}}, {}):
        argv = () if options else ("--api-key", text)
        with pytest.raises(ConfigError, match=r"^--api-key \(or OCTAVO_API_KEY\) .* holds no key: give one") as raised:
            parse(*argv, **options)
        assert "\n" not in str(raised.value)
    assert parse("--api-key", "a, b,").server.api_keys == ["a", "b"]
    assert parse().server.api_keys == []


def test_only_the_sections_asked_for() -> None:
    assert parse("--seed", "3", only=OFFLINE).model.seed == 3
    with pytest.raises(SystemExit):
        parse("--port", "1", only=OFFLINE)


def test_options_are_only_what_was_given() -> None:
    parser = Parser(prog="octavo")
    add_config_flags(parser, OFFLINE)
    assert options_from(parser.parse_args(["m", "--no-enable-prefix-caching"])) == {
        "model": "m",
        "enable_prefix_caching": False,
    }


MISTAKES = [
    (("--prot", "3"), "unknown flag --prot; did you mean --port?"),
    (("--max-model", "3"), "unknown flag --max-model; did you mean --max-model-len?"),
    (("--zzzzqqqq",), "unknown flag --zzzzqqqq"),
    (("--dtype", "fp33"), "--dtype: 'fp33' is not one of auto, float32, bfloat16, float16"),
    (("--port", "http"), "--port: 'http' is not a whole number"),
    (("--port", "8000.5"), "--port: '8000.5' is not a whole number"),
    (("--swap-space", "nan"), "--swap-space: 'nan' is not a number"),
    (("--swap-space", "inf"), "--swap-space: 'inf' is not a finite number"),
    (("--swap-space=-Infinity",), "--swap-space: '-Infinity' is not a finite number"),
    (("--shutdown-timeout", "1e400"), "--shutdown-timeout: '1e400' is not a finite number"),
    (("--gpu-memory-utilization", "inf"), "--gpu-memory-utilization: 'inf' is not a finite number"),
    (("--max-num-seqs", "9" * 400 + ".5"), f"--max-num-seqs: '{'9' * 400}.5' is not a count: give 8192, 8k (k = 1024), or auto if the flag accepts it"),
    (("--max-inter-token-ms", "soon"), "--max-inter-token-ms: 'soon' is not a number of milliseconds, auto or off"),
    (("--max-inter-token-ms", "inf"), "--max-inter-token-ms: 'inf' is not a number of milliseconds, auto or off"),
    (("--max-model-len", "8q"), "--max-model-len: '8q' is not a count: give 8192, 8k (k = 1024), or auto if the flag accepts it"),
    (("--max-model-len", "0.3k"), "--max-model-len: '0.3k' is not a count: give 8192, 8k (k = 1024), or auto if the flag accepts it"),
    (("--max-num-seqs", "1.2.3"), "--max-num-seqs: '1.2.3' is not a count: give 8192, 8k (k = 1024), or auto if the flag accepts it"),
    (("--kv-cache-memory-bytes", "2GB"), "--kv-cache-memory-bytes: '2GB' is not a size: give bytes, or K, M, G, T (powers of 1024) as in 512M or 1.5G"),
    (("--port",), "--port: expected one argument"),
    (("a", "b"), "unexpected argument 'b'"),
    (("--enable-prefix-caching=yes",), "--enable-prefix-caching/--no-enable-prefix-caching: ignored explicit argument 'yes'"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "line"), MISTAKES)
def test_a_mistake_is_one_line(argv: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"octavo: error: {line}\n"


def test_a_value_out_of_range_names_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--port must be between 0 and 65535, got 70000$"):
        parse("--port", "70000")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e300])
def test_no_option_of_python_takes_a_number_without_end(value: float) -> None:
    """LLM(swap_space=…) does not pass through the flags."""
    knobs = [knob.name for _, cls in sections() for knob in dataclasses.fields(cls) if knob.type is float]
    assert len(knobs) >= 3
    for name in knobs:
        flag = "--" + name.replace("_", "-")
        with pytest.raises(ConfigError, match=f"^{flag} must be .*, got "):
            replace(Config(), **{name: value})


def test_help_shows_defaults_and_sections(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for part in (
        "(default: 8000)",
        "(default: 32M)",
        "(default: on)",
        "(default: auto)",
        "scheduler:",
        "--no-enable-prefix-caching",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("argv", "model", "names"),
    [
        (["m", "--served-model-name", "a"], "m", ["a"]),
        (["m", "--served-model-name", "a", "b"], "m", ["a", "b"]),
        (["m", "--served-model-name", "a", "b", "--port", "1"], "m", ["a", "b"]),
        (["--model", "m", "--served-model-name", "a", "b"], "m", ["a", "b"]),
        (["--served-model-name", "a", "m"], "m", ["a"]),
        (["--served-model-name", "a", "--", "m"], "m", ["a"]),
        (["--served-model-name=a,b,a"], "", ["a", "b"]),
        (["m", "--served-model-name", "a", "--served-model-name", "b", "c"], "m", ["a", "b", "c"]),
        ([], "", []),
    ],
)
def test_names_of_the_model(argv: list[str], model: str, names: list[str]) -> None:
    config = parse(*argv)
    assert (config.model.model, config.model.served_names) == (model, names)
    assert config.model.name_of("own") == (names[0] if names else "own")


def test_json_flags_take_objects(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse("--hf-overrides", '{"a": 1}', "--override-generation-config", '{"top_k": 5}')
    assert (config.model.hf_overrides, config.model.override_generation_config) == ('{"a": 1}', '{"top_k": 5}')
    for bad in ("[1]", "{", "3"):
        with pytest.raises(SystemExit):
            parse("--hf-overrides", bad)
        assert capsys.readouterr().err == f"octavo: error: --hf-overrides: {bad!r} is not a JSON object\n"
