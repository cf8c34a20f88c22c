"""Settings from a file and from the environment, and which of them comes first."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from octavo.cli.flags import Parser, add_config_flags, add_settings_file, config_from
from octavo.cli.main import build_parser
from octavo.cli.settings import unknown_variables, variable_of
from octavo.config import Config, sections
from octavo.errors import ConfigError


def parse(*argv: str, **environ: str) -> Config:
    parser = Parser(prog="octavo")
    add_settings_file(parser)
    add_config_flags(parser)
    return config_from(parser.parse_args(argv), environ)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "octavo.yaml"


def test_a_file_sets_flags_by_their_names(file: Path) -> None:
    file.write_text(
        "model: org/model\nmax-model-len: 8k\nmax_num_seqs: 7\nenable-prefix-caching: false\nenforce-eager: true\n"
        "gpu-memory-utilization: 0.5\napi-key: [one, two]\ntrust-remote-code: true\nchat-template:\n"
    )
    config = parse("--config", str(file))
    assert (config.model.model, config.model.max_model_len, config.scheduler.max_num_seqs) == ("org/model", 8192, 7)
    assert (config.cache.enable_prefix_caching, config.model.enforce_eager) == (False, True)
    assert (config.cache.gpu_memory_utilization, config.server.api_keys) == (0.5, ["one", "two"])


@pytest.mark.parametrize(
    ("text", "value"), [("off", 0.0), ("false", 0.0), ("75", 75.0), ("auto", "auto"), ("'off'", 0.0)]
)
def test_a_number_that_may_be_off(file: Path, text: str, value: float | str) -> None:
    """To YAML, off is a truth value."""
    file.write_text(f"max-inter-token-ms: {text}\n")
    assert parse("--config", str(file)).scheduler.max_inter_token_ms == value


def test_serve_reads_the_file(file: Path) -> None:
    file.write_text("port: 9\n")
    assert config_from(build_parser().parse_args(["serve", "--config", str(file)]), {}).server.port == 9


def test_flags_come_before_variables_and_these_before_the_file(file: Path) -> None:
    file.write_text("port: 1\nhost: a\nmodel: in-file\nmax-model-len: 5\n")
    config = parse("given", "--config", str(file), "--port", "3", OCTAVO_PORT="2", OCTAVO_HOST="b")
    assert (config.server.port, config.server.host) == (3, "b")
    assert (config.model.model, config.model.max_model_len) == ("given", 5)
    assert parse("--config", str(file), OCTAVO_MODEL="in-environment").model.model == "in-environment"


def test_every_flag_is_a_variable() -> None:
    names = [variable_of(knob) for _, cls in sections() for knob in dataclasses.fields(cls)]
    assert len(set(names)) == len(names) and "OCTAVO_BLOCK_SIZE" in names and "OCTAVO_TENSOR_PARALLEL_SIZE" in names
    config = parse(OCTAVO_BLOCK_SIZE="32", OCTAVO_ENFORCE_EAGER="on", OCTAVO_ENABLE_PREFIX_CACHING="0", OCTAVO_HOST="")
    assert (config.cache.page_size, config.model.enforce_eager, config.cache.enable_prefix_caching) == (32, True, False)
    assert config.server.host == "127.0.0.1"


def test_a_variable_that_is_not_known_is_named() -> None:
    given = {"OCTAVO_PROT": "1", "OCTAVO_PORT": "1", "OCTAVO_CACHE": "x", "OCTAVO_ZEBRA": "z", "PATH": "y"}
    assert unknown_variables(given) == {"OCTAVO_PROT": "OCTAVO_PORT", "OCTAVO_ZEBRA": ""}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("- a\n- b\n", "must be a mapping of flag names to values"),
        ("port: [1, {a: 2}]\n", "port must be a text, a number, true, false or a list"),
        ("a: b: c\n", "is not valid YAML: line 1, column 5: mapping values are not allowed here"),
        ("[" * 5000, "is not valid YAML"),
        ("config: other.yaml\n", "names another file"),
        ("model-settings: {a: {b: 2001-01-01}}\n", "model-settings must hold texts, numbers, lists and mappings only"),
        ("model-settings: &x {a: *x}\n", "model-settings has more than 100000 values, or holds itself"),
        (
            "a: &a [x, x, x, x, x, x, x, x]\n"
            + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 8)}]\n" for a, b in itertools.pairwise("abcdefghij"))
            + "model-settings: {a: *j}\n",
            "more than 100000 values|must be a text",
        ),
    ],
)
def test_a_bad_file_is_refused(file: Path, content: str, problem: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError, match=problem):
        parse("--config", str(file))


def test_a_bad_value_in_a_file_names_the_flag(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("port: many\n")
    with pytest.raises(SystemExit):
        parse("--config", str(file))
    assert capsys.readouterr().err == f"octavo: error: --config {file}: --port: 'many' is not a whole number\n"
    file.write_text("prot: 1\n")
    with pytest.raises(SystemExit):
        parse("--config", str(file))
    assert ": unknown flag --prot; did you mean --port?" in (error := capsys.readouterr().err) and "--config " in error


def test_a_file_that_is_missing_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*octavo.yaml cannot be read \(No such file or directory\)"):
        parse("--config", str(file))


@pytest.mark.parametrize(
    ("name", "text"), [("OCTAVO_PORT", "x"), ("OCTAVO_ENFORCE_EAGER", "maybe"), ("OCTAVO_DTYPE", "int3")]
)
def test_a_bad_variable_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"the environment variable {name}: '{text}' is not"):
        parse(**{name: text})
