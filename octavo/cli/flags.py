"""Command-line flags generated from the config dataclasses: every knob is a flag, with its help, its default and its bounds. A
bad value gives one line that names the flag and what it accepts."""

import argparse
import builtins
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.cli.settings import arguments_in, from_environment
from octavo.config import (
    AUTO,
    COUNT_HINT,
    SIZE_HINT,
    Config,
    read_count,
    read_json_object,
    read_size,
    replace,
    sections,
)
from octavo.errors import ConfigError
from octavo.foreign_flags import FOREIGN, ForeignFlag, translate

if TYPE_CHECKING:
    from octavo.key_settings import KeyFile

OFFLINE = ("model", "cache", "scheduler", "lora", "parallel")
"""Sections that apply without a server."""
REQUEST_KNOBS = (
    "max_body_bytes", "max_bodies_bytes", "max_messages", "max_n", "max_logprobs", "max_request_sequences", "max_request_tokens", "strict_fields",
    "tool_call_parser", "reasoning_parser", "enable_auto_tool_choice",
)  # fmt: skip
"""Knobs of the server and budget sections that affect how a request is handled, so that they apply to offline batches too."""

_FILE, _IN_FILE = (
    "settings_file",
    "settings_in_file",
)  # the value of --config, and the config fields that this file sets
_LAST_NAME = "last_served_name"  # the last of several values after one --served-model-name
_DEST = "config."  # prefix of config fields in the namespace, to separate them from the commands' own flags
MAX_USAGE_FLAGS = 16
"""Above so many flags the usage line of the help does not list them: the groups below it do."""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviated flags, with `_` accepted for `-` in flag names, and with one-line errors that suggest the
    nearest name."""

    takes_foreign_flags = False
    foreign_flags: Mapping[str, ForeignFlag] = FOREIGN
    """Whether flags of other servers are translated: those that configure a model and its server."""

    foreign_commands: Mapping[str, str] = {}
    """Commands of other servers, and what does the same here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self._file = ""  # of --config, while its settings are parsed

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = [_dashed(text) for text in (sys.argv[1:] if args is None else args)]
        if self.takes_foreign_flags:
            given, notes, refusal = translate(given, self._option_string_actions, self.foreign_flags)
            if refusal:
                self.error(refusal)
            for note in notes:
                sys.stderr.write(f"octavo: {note}\n")
        known, unknown = super().parse_known_args(given, namespace)
        if self.takes_foreign_flags and not unknown and (file := getattr(known, _FILE, None)):
            setattr(known, _IN_FILE, self._options_in(file))
        if unknown:
            # Reported here, not by the top-level parser, because only the subcommand's parser knows its flags.
            self.error(self._about_unknown(unknown[0]))
        return known, []

    def format_help(self) -> str:
        """The help, whose first lines name the arguments and not all of many flags."""
        if self.usage is None and len(self._get_optional_actions()) > MAX_USAGE_FLAGS:
            arguments = [_shown_argument(action) for action in self._get_positional_actions()]
            self.usage = " ".join([self.prog, *arguments, "[flags]"])
        return super().format_help()

    def _options_in(self, file: str) -> dict[str, Any]:
        """The config fields that the file of --config sets."""
        arguments = arguments_in(file)
        if any(argument.startswith("--config=") for argument in arguments):
            raise ConfigError(f"--config {file} names another file: put all settings into one")
        self._file = file
        try:
            in_file, _ = self.parse_known_args(arguments, argparse.Namespace())
        finally:
            self._file = ""
        return options_from(in_file)

    def _about_unknown(self, text: str) -> str:
        if not text.startswith("-"):
            return f"unexpected argument {text!r}"
        name = text.split("=")[0]
        if name in ("--host", "--port") and "--url" in self._option_string_actions:
            return f"unknown flag {name}: name the server with --url http://HOST:PORT"
        return f"unknown flag {name}{_nearest(name, list(self._option_string_actions))}"

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        if wrong := re.match(r"(\S+): invalid choice: '(.*?)' \(choose from (.*)\)$", message):
            name, value, names = wrong[1], wrong[2], wrong[3].replace("'", "")
            message = f"{name}: {value!r} is not one of {names}{_nearest(value, names.split(', '))}"
            if value in self.foreign_commands:
                message = f"there is no command {value}: {self.foreign_commands[value]}"
        where = f"--config {self._file}: " if self._file else ""
        sys.stderr.write(f"octavo: error: {where}{message}\n")
        raise SystemExit(2)


def _shown_argument(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name)


def _dashed(text: str) -> str:
    name, equals, value = text.partition("=")
    return name.replace("_", "-") + equals + value if re.fullmatch(r"--[A-Za-z][\w-]*", name) else text


def _nearest(name: str, names: list[str]) -> str:
    import difflib  # imported lazily: only needed for an error

    # Compared without dashes: those of short names would make them alike (--temp, --tp).
    by_word = {known.lstrip("-"): known for known in names if known.startswith("--") or not name.startswith("--")}
    close = difflib.get_close_matches(name.lstrip("-"), by_word, n=1, cutoff=0.75)
    return f"; did you mean {by_word[close[0]]}?" if close else ""


def add_config_flags(
    parser: argparse.ArgumentParser,
    only: Sequence[str] = (),
    *,
    also: Sequence[str] = (),
    positional: bool = True,
    takes_several: bool = False,
) -> None:
    """Add a flag for every knob of the sections in `only` (all if empty), and for the knobs in `also`. `positional`: MODEL may be
    given without a flag; `takes_several`: so may several."""
    if isinstance(parser, Parser):
        parser.takes_foreign_flags = True
    for section, cls in sections():
        knobs = [knob for knob in dataclasses.fields(cls) if not only or section in only or knob.name in also]
        if not knobs:
            continue
        group = parser.add_argument_group(section)
        for knob in knobs:
            if knob.metadata["flag"] == "MODEL":
                _add_model(parser, group, knob, positional, takes_several)
            else:
                _add_knob(group, knob)


def _add_model(
    parser: argparse.ArgumentParser,
    group: argparse._ArgumentGroup,
    knob: "dataclasses.Field[Any]",
    positional: bool,
    takes_several: bool,
) -> None:
    text = knob.metadata["help"]
    if takes_several:
        text += "; several, or NAME=MODEL, are served on one port (--models)"
    if positional:
        nargs = "*" if takes_several else "?"
        parser.add_argument(_DEST + "positional_model", metavar="MODEL", nargs=nargs, default=None, help=text)
    group.add_argument("--model", dest=_DEST + knob.name, metavar="MODEL", default=argparse.SUPPRESS, help=text)


def _add_knob(group: argparse._ArgumentGroup, knob: "dataclasses.Field[Any]") -> None:
    options: dict[str, Any] = {
        "dest": _DEST + knob.name,
        "default": argparse.SUPPRESS,  # an absent flag keeps the dataclass's default
        "help": (knob.metadata["help"] + _show_default(knob)).replace("%", "%%"),
    }
    if knob.type is bool:
        group.add_argument(*_names(knob), action=argparse.BooleanOptionalAction, **options)
        return
    choices = knob.metadata["choices"]
    if knob.metadata["kind"] == "list":
        options["action"] = _Gather
    if knob.metadata["kind"] == "names":
        options |= {"action": _GatherNames, "nargs": "+"}
    metavar = "{" + ",".join(choices) + "}" if choices else _metavar(knob)
    group.add_argument(*_names(knob), type=_reader(knob), metavar=metavar, **options)


def add_settings_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group("settings").add_argument(
        "--config",
        dest=_FILE,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file with flags as keys (max-model-len: 8k). Flags and OCTAVO_ variables come before it",
    )


class _Gather(argparse.Action):
    """Action of a list knob, which may be given several times."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


class _GatherNames(_Gather):
    """The same for a knob that takes several values at once, which may have taken the command's MODEL for the last of them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, _LAST_NAME, values[-1] if len(values) > 1 else None)
        super().__call__(parser, namespace, ",".join(values), option_string)


def _names(knob: "dataclasses.Field[Any]") -> list[str]:
    """Option strings of a knob: `--name` for each of its names; a short alias such as `tp` also with one dash."""
    names = (knob.metadata["flag"] or knob.name.replace("_", "-")).split(",")
    return [f"--{name}" for name in names] + [f"-{name}" for name in names if len(name) <= 2]


def _show_default(knob: "dataclasses.Field[Any]") -> str:
    value = knob.default
    if isinstance(value, bool):
        value = "on" if value else "off"
    elif knob.metadata["kind"] == "bytes" and isinstance(value, int) and value % 2**20 == 0:
        value = f"{value // 2**20}M"
    return f" (default: {value})" if value != "" else ""  # the help text explains an empty value


def _metavar(knob: "dataclasses.Field[Any]") -> str:
    if knob.metadata["kind"] in ("tokens", "bytes", "ms"):
        return {"tokens": "N", "bytes": "BYTES", "ms": "MS"}[knob.metadata["kind"]]
    match knob.type:
        case builtins.int:
            return "N"
        case builtins.float:
            return "X"
        case _:
            return knob.name.split("_")[-1].upper()


def _reader(knob: "dataclasses.Field[Any]") -> Callable[[str], Any]:
    if knob.metadata["choices"]:
        return one_of(knob.metadata["choices"])
    if knob.metadata["kind"] == "tokens":
        return lambda text: _automatic(text) or count(text)
    if knob.metadata["kind"] == "bytes":
        return lambda text: _automatic(text) or size(text)
    if knob.metadata["kind"] == "ms":
        return milliseconds
    if knob.metadata["kind"] in ("list", "names"):
        return entries
    if knob.metadata["kind"] == "json":
        return json_object
    match knob.type:
        case builtins.int:
            return integer
        case builtins.float:
            return finite
        case _:
            return str


def _automatic(text: str) -> str:
    return AUTO if text.strip().lower() in (AUTO, "-1") else ""


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return read


def entries(text: str) -> str:
    """Parse a list knob: comma-separated text, or a JSON list as in vLLM."""
    if not text.lstrip().startswith("["):
        return text
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) and "," not in value for value in values):
        raise argparse.ArgumentTypeError(f'{text!r} is not a list: give a,b or ["a","b"]')
    return ",".join(values)


def json_object(text: str) -> str:
    try:
        read_json_object(text, "it")
    except ConfigError:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not a JSON object") from None
    return text


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """Parse a number, which may be infinite (a request rate, for example)."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def finite(text: str) -> float:
    value = number(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def milliseconds(text: str) -> float | str:
    """Parse a number of milliseconds, `auto`, or `off`, which is 0."""
    word = text.strip().lower()
    if word in (AUTO, "off"):
        return AUTO if word == AUTO else 0.0
    try:
        return finite(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds, auto or off") from None


def count(text: str) -> int:
    """Parse a count: 8192, 8k, 1.5k."""
    if (value := read_count(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count: {COUNT_HINT}")
    return value


def size(text: str) -> int:
    """Parse a number of bytes: 1048576, 512M, 1.5G, 2GiB."""
    if (value := read_size(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: {SIZE_HINT}")
    return value


def options_from(arguments: argparse.Namespace) -> dict[str, Any]:
    """The config fields that were given as flags, by name, as keyword arguments of `LLM`."""
    given = {name.removeprefix(_DEST): value for name, value in vars(arguments).items() if name.startswith(_DEST)}
    model = given.pop("positional_model", None)
    if isinstance(model, list):
        if len(model) > 1 or (model and _is_named(model[0])):
            if "models" in given:
                raise ConfigError("models are named twice: as MODEL and by --models; give one of the two")
            if any("," in each for each in model):
                raise ConfigError("the name of one of several models has a comma: rename it")
            given["models"] = ",".join(model)
            return given
        model = model[0] if model else None
    if model is None and "model" not in given and (last := getattr(arguments, _LAST_NAME, None)) is not None:
        # `--served-model-name NAME MODEL`, as it is written where the flag takes one name.
        given["served_model_name"], model = given["served_model_name"].removesuffix("," + last), last
    if model is not None:
        if given.get("model", model) != model:
            raise ConfigError(f"two models are named: {model!r} and --model {given['model']!r}; give one")
        given["model"] = model
    return given


def _is_named(model: str) -> bool:
    """Whether this is NAME=MODEL, and no file whose name has a =."""
    return re.match(r"[^/=]+=.", model) is not None and not Path(model).exists()


def config_from(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Config:
    """Build the configuration from the flags, the environment and the file of --config. Raises ConfigError for a value out of
    range."""
    given_flags = options_from(arguments)
    options = {**getattr(arguments, _IN_FILE, {}), **from_environment(environ, _reader), **given_flags}
    for one, other in (
        ("model", "models"),
        ("models", "model"),
    ):  # one model or several: what the command line names replaces both
        if given_flags.get(one) and other not in given_flags:
            options.pop(other, None)
    if file := options.get("api_key_file"):
        found = _keys_in(file)
        for name, keys in (("api_key", found.keys), ("admin_key", found.admin_keys)):
            if keys:
                options[name] = ",".join([*filter(None, [options.get(name)]), *keys])
        if found.settings:
            options["key_settings"] = _joined_settings(found, options.get("key_settings", ""))
    # VLLM_API_KEY too: a deployment that moves from vLLM must not lose its API key.
    given = environ.get("OCTAVO_API_KEY") or environ.get("VLLM_API_KEY")
    if "api_key" not in options and given:
        options["api_key"] = given
    if "admin_key" not in options and (given := environ.get("OCTAVO_ADMIN_KEY")):
        options["admin_key"] = given
    return replace(Config(), **options)


def _joined_settings(found: "KeyFile", given: str) -> str:
    from octavo import key_settings

    return key_settings.encode({**found.settings, **key_settings.decode(given)})


def _keys_in(file: str) -> "KeyFile":
    from octavo.key_settings import read_key_file  # it brings msgspec, which --help does not need

    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--api-key-file {file} cannot be read ({error.strerror}): give a file of keys") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {file} is not a text file: write a key in each line") from None
    found = read_key_file(text, f"--api-key-file {file}")
    if not found.keys and not found.admin_keys:
        raise ConfigError(f"--api-key-file {file} holds no key: write one in each line, or leave the flag out")
    return found
