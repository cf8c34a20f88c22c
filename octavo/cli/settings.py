"""Settings from a file (`--config FILE`) and from the environment (`OCTAVO_…`). A flag on the command line comes before a
variable, a variable before the file, and the file before the default."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from octavo.config import sections
from octavo.errors import ConfigError

PREFIX = "OCTAVO_"
OTHER_VARIABLES = frozenset(
    {
        "OCTAVO_CACHE",
        "OCTAVO_NATIVE",
        "OCTAVO_PLAIN_LAUNCH",
        "OCTAVO_TEST_MODELS",
        "OCTAVO_PYTHON",
        "OCTAVO_AGENT_SECRET",
        "OCTAVO_CLOCK_OFFSET_NS",
        "OCTAVO_RANK_SECRET",
    }
)
"""Variables that are no flags. The last two are read by tests."""
MAX_FILE_BYTES = 2**20
MAX_VALUES = 100_000  # of one setting that is a mapping
_KEYS = frozenset({"api_key", "admin_key"})  # a key file replaces their variables: flags.py reads them
_SWITCH = {
    "1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False,
}  # fmt: skip

_JSON = "json"

Reader = Callable[["dataclasses.Field[Any]"], Callable[[str], Any]]


def variable_of(knob: "dataclasses.Field[Any]") -> str:
    """The variable of a knob: --max-model-len is OCTAVO_MAX_MODEL_LEN."""
    name = str(knob.metadata["flag"] or knob.name).split(",")[0]
    return PREFIX + name.replace("-", "_").upper()


def from_environment(environ: Mapping[str, str], reader: Reader) -> dict[str, Any]:
    """The config fields that variables set, by name. An empty variable counts as unset. Raises ConfigError."""
    found: dict[str, Any] = {}
    for _, cls in sections():
        for knob in dataclasses.fields(cls):
            text = environ.get(variable := variable_of(knob), "").strip()
            if not text or knob.name in _KEYS:
                continue
            try:
                found[knob.name] = _switch(text) if knob.type is bool else reader(knob)(text)
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"the environment variable {variable}: {error}") from None
    return found


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with our prefix that no flag has, and the known one that each is close to (empty: none)."""
    known = OTHER_VARIABLES | {variable_of(knob) for _, cls in sections() for knob in dataclasses.fields(cls)}
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    if not unknown:
        return {}
    import difflib  # imported lazily: only needed for a mistake

    # Compared without the prefix, which would make all of them alike.
    words = [name.removeprefix(PREFIX) for name in sorted(known)]
    found = {name: difflib.get_close_matches(name.removeprefix(PREFIX), words, n=1, cutoff=0.75) for name in unknown}
    return {name: PREFIX + close[0] if close else "" for name, close in found.items()}


def wants_json_lines(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether `octavo serve` is to log JSON, found before its arguments are parsed: what is wrong with them is logged as well. The last
    flag counts, as for the parser; then the variable; then the file of --config."""
    if not argv or argv[0] != "serve":
        return False
    if (given := _last_value(argv, "--log-format")) is not None:
        return given == _JSON
    if given := environ.get(PREFIX + "LOG_FORMAT", "").strip():
        return given == _JSON
    if (file := _last_value(argv, "--config")) is None:
        return False
    try:
        return _last_value(arguments_in(file), "--log-format") == _JSON
    except ConfigError:  # the parser reports it
        return False


def _last_value(argv: Sequence[str], flag: str) -> str | None:
    found = None
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else following
    return found


def arguments_in(file: str) -> list[str]:
    """The settings of a YAML file as command-line arguments: `max-model-len: 8k`, `enable-prefix-caching: false`. Names are those
    of the flags, with - or _. Raises ConfigError."""
    import yaml  # type: ignore[import-untyped]  # lazily: only needed with --config

    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--config {file} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {file} is not a text file") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"--config {file} is larger than {MAX_FILE_BYTES} characters")
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"--config {file} is not valid YAML: {_problem(error)}") from None
    if content is None:
        return []
    if not isinstance(content, dict) or not all(isinstance(name, str) and name for name in content):
        raise ConfigError(f"--config {file} must be a mapping of flag names to values, for example 'port: 9000'")
    return [argument for name, value in content.items() for argument in _argument(file, name, value)]


def _problem(error: Exception) -> str:
    """What is wrong with a YAML file, and where."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return " ".join(str(error).split())[:200]
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"[:200]


def _argument(file: str, name: str, value: object) -> list[str]:
    flag = "--" + name.strip().lstrip("-").replace("_", "-")
    match value:
        case True:
            return [flag]
        case False if flag in _may_be_off():  # `off` is false in YAML
            return [f"{flag}=off"]
        case False:
            return ["--no-" + flag[2:]]
        case None:
            return []
        case str() | int() | float():
            return [f"{flag}={value}"]
        case list() if all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in value):
            return [f"{flag}={','.join(map(str, value))}"]
        case dict():
            return [f"{flag}={_as_json(file, name, value)}"]
    raise ConfigError(f"--config {file}: {name} must be a text, a number, true, false or a list of texts")


def _as_json(file: str, name: str, value: dict[object, object]) -> str:
    """A mapping as JSON. Aliases make a small YAML file large, or without end: it is counted before it is written."""
    left, level = MAX_VALUES, [cast(object, value)]
    while level:
        left -= len(level)
        if left < 0:
            raise ConfigError(f"--config {file}: {name} has more than {MAX_VALUES} values, or holds itself")
        inside: list[object] = []
        for each in level:
            if isinstance(each, dict | list):
                inside += each.values() if isinstance(each, dict) else each
                if len(inside) > MAX_VALUES:
                    break
        level = inside
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        raise ConfigError(f"--config {file}: {name} must hold texts, numbers, lists and mappings only") from None


def _may_be_off() -> set[str]:
    """Flags with a number that may be `off`."""
    knobs = [knob for _, cls in sections() for knob in dataclasses.fields(cls)]
    return {"--" + knob.name.replace("_", "-") for knob in knobs if knob.metadata["kind"] == "ms"}


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_SWITCH)}")
    return _SWITCH[text.lower()]
