"""load_text(): builds Text from a model's folder or GGUF file: its tokenizer, template, end-of-sequence ids and sampling
defaults."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.config import AUTO, read_json_object
from octavo.errors import ConfigError, InvalidRequest, quote
from octavo.gguf import GGUFFile
from octavo.messages import SamplingParams
from octavo.text.chat.template import RESERVED, ChatTemplate
from octavo.text.classifier_config import ClassifierConfig, read_classifier_config
from octavo.text.formats import choose_formats
from octavo.text.pooling_config import PoolingConfig, gguf_pooling_config, read_pooling_config
from octavo.text.text import Text
from octavo.text.tokenize.files import NAMES, QWEN_FILE, TEKKEN_FILE, vocabulary_file
from octavo.text.tokenize.gguf_vocab import (
    gguf_chat_templates,
    gguf_eos_ids,
    gguf_template_variables,
    gguf_tokenizer,
    read_vocabulary,
)
from octavo.text.tokenize.tokenizer import Tokenizer, read_tokenizer_json

log = logging.getLogger("octavo.text")

_SETTINGS = "tokenizer_config.json"
# For vocabularies that come without settings: their special tokens by role, and further tokens that end a text.
_ROLES_OF = {
    TEKKEN_FILE: {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    QWEN_FILE: {"eos_token": "<|endoftext|>"},
}
_ENDS_OF = {QWEN_FILE: ("<|im_end|>",)}
NEUTRAL = "vllm"  # of --generation-config
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_SAMPLING = {
    **{name: name for name in ("top_p", "top_k", "min_p")},
    "temperature": "temp",
    "repetition_penalty": "penalty_repeat",
}
"""Our names → the ends of the keys `general.sampling.…`."""
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_text(
    source_path: Path,
    *,
    tokenizer: str = "",
    chat_template: str = "",
    default_chat_template_kwargs: str = "",
    default_sampling: Mapping[str, float] | None = None,
    generation_config: str = AUTO,
    override_generation_config: str = "",
    hf_overrides: str = "",
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
) -> Text:
    """Load the text side of a model. `source_path`: a folder or a .gguf file. `tokenizer`: a folder or file that replaces the
    model's own vocabulary and template. `chat_template`: a file that replaces the template of both. `default_sampling`: values
    for what the model's own generation_config.json does not set. `default_chat_template_kwargs`, `generation_config`,
    `override_generation_config`, `hf_overrides`: as the flags of these names. For the parsers see formats.py."""
    model_path = Path(source_path)
    words_path = Path(tokenizer).expanduser() if tokenizer else model_path
    if not words_path.exists():
        if not tokenizer:
            raise ConfigError(f"the model {words_path} does not exist; give a folder or a file that does")
        own = "; a .gguf file has a tokenizer of its own: leave the flag out" if model_path.suffix == ".gguf" else ""
        raise ConfigError(
            f"--tokenizer {tokenizer} does not exist: it names a folder or a file, not a model of the hub{own}"
        )
    override = _template_file(chat_template) if chat_template else None
    generation = _read_json(model_path / "generation_config.json") if model_path.is_dir() else {}
    stop_ids = _ids(generation.get("eos_token_id"))
    classifier_config: ClassifierConfig | None = None
    if model_path.is_dir():
        overrides = read_json_object(hf_overrides, "--hf-overrides")
        config = {**_read_json(model_path / "config.json"), **overrides}
        stop_ids |= _ids(config.get("eos_token_id"))
        classifier_config = read_classifier_config(config)
    elif words_path != model_path:  # the model's own stop ids apply whatever the tokenizer
        metadata = GGUFFile(model_path).metadata
        stop_ids |= set(gguf_eos_ids(read_vocabulary(metadata)))
        generation = _gguf_sampling(metadata)

    pooling_config: PoolingConfig | None = None
    if words_path.is_file() and _is_gguf(words_path):
        metadata = GGUFFile(words_path).metadata
        if words_path == model_path:
            pooling_config, generation = gguf_pooling_config(metadata), _gguf_sampling(metadata)
        vocabulary = read_vocabulary(metadata)
        words = gguf_tokenizer(vocabulary)
        sources = gguf_chat_templates(metadata)
        variables = gguf_template_variables(vocabulary)
        stop_ids |= set(gguf_eos_ids(vocabulary))
    else:
        folder = words_path if words_path.is_dir() else words_path.parent
        settings = _read_json(folder / _SETTINGS)
        file = _vocabulary_file(words_path, folder)
        words = _file_tokenizer(file, folder, settings)
        sources = _folder_templates(folder, settings)
        variables = {**_ROLES_OF.get(_kind(file), {}), **_folder_variables(folder, settings)}
        for token in (variables.get("eos_token"), *_ENDS_OF.get(_kind(file), ())):
            stop_ids |= _ids(words.token_id(token)) if token is not None else set()
    chosen = _template_variables(default_chat_template_kwargs)
    template = ChatTemplate(override or sources, {**variables, **chosen})
    if chosen and not (override or sources):
        log.warning("--default-chat-template-kwargs has no effect: the model has no chat template")
    elif unread := [name for name in chosen if not (template.reads(name) or template.reads(name, with_tools=True))]:
        log.warning("--default-chat-template-kwargs: the chat template does not read %s", ", ".join(map(quote, unread)))
    sampling = _default_sampling(default_sampling or {}, generation, model_path, generation_config)
    sampling |= _overridden(override_generation_config)
    if pooling_config is None:  # for a single file, read the settings in its folder
        pooling_config = read_pooling_config(
            model_path if model_path.is_dir() or _is_gguf(model_path) else model_path.parent
        )
    formats = choose_formats(template, tool_call_parser, reasoning_parser)
    return Text(words, template, sorted(stop_ids), sampling, pooling_config, formats, classifier_config)


def _is_gguf(path: Path) -> bool:
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _vocabulary_file(path: Path, folder: Path) -> Path:
    if path.is_file():
        return path
    found = vocabulary_file(folder)
    if found is not None:
        return found
    raise ConfigError(
        f"{folder} has no tokenizer.json and no SentencePiece .model ({', '.join(NAMES[1:])} would also do); "
        "give --tokenizer a folder that has one"
    )


def _kind(file: Path) -> str:
    """The usual file name of this kind of vocabulary."""
    if file.suffix == ".json":
        return TEKKEN_FILE if file.name.startswith("tekken") else "tokenizer.json"
    return QWEN_FILE if file.suffix == ".tiktoken" else "tokenizer.model"


def _file_tokenizer(file: Path, folder: Path, settings: dict[str, Any]) -> Tokenizer:
    # Imported lazily: most models have a tokenizer.json and need none of the others.
    match _kind(file):
        case "tokenizer.json":
            return read_tokenizer_json(file)
        case "tokenizer.model":
            return _sentencepiece_tokenizer(file, folder, settings)
    from octavo.text.tokenize import tiktoken_vocab

    return tiktoken_vocab.read_tekken(file) if _kind(file) == TEKKEN_FILE else tiktoken_vocab.read_qwen_tiktoken(file)


def _sentencepiece_tokenizer(path: Path, folder: Path, settings: dict[str, Any]) -> Tokenizer:
    from octavo.text.tokenize.sentencepiece_vocab import AddedTokens, SentencePieceTokenizer, control_tokens
    from octavo.text.tokenize.tiktoken_vocab import is_tiktoken

    model = path.read_bytes()
    if is_tiktoken(model[:1000]):
        raise ConfigError(
            f"{path} is a tiktoken vocabulary, which does not contain its pre-tokenizer: give --tokenizer a folder with the "
            "model's tokenizer.json"
        )
    try:
        id_of = control_tokens(model)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    special_ids = set(id_of.values())
    for token, token_id, is_special in _added_tokens(folder, settings):
        id_of[token] = token_id
        if is_special:
            special_ids.add(token_id)
    named = _folder_variables(folder, settings).values()
    special_ids |= {id_of[token] for token in named if token in id_of}
    bos, eos = (
        id_of.get(_content(settings.get(role)) or name) for role, name in (("bos_token", "<s>"), ("eos_token", "</s>"))
    )
    return SentencePieceTokenizer(
        model,
        AddedTokens(id_of, frozenset(special_ids)),
        before=[bos] if bos is not None and settings.get("add_bos_token", True) else [],
        after=[eos] if eos is not None and settings.get("add_eos_token", False) else [],
        prefixes_every_part=settings.get("legacy") is not False,
    )


def _added_tokens(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[str, int, bool]]:
    """Yield (content, id, whether it is special) of every token that was added to those of the SentencePiece model."""
    path = folder / "added_tokens.json"
    for token, token_id in _read_json(path).items():
        if not isinstance(token_id, int):
            raise ConfigError(f"{path} is corrupt: the id of {token!r} is {token_id!r}; fetch it again")
        yield token, token_id, False
    decoder = settings.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise ConfigError(f"{folder / _SETTINGS} is corrupt: added_tokens_decoder is not an object; fetch it again")
    for number, entry in decoder.items():
        match entry:
            case {"content": str(content)} if number.isdecimal():
                yield content, int(number), bool(entry.get("special"))
            case _:
                raise ConfigError(
                    f"{folder / _SETTINGS} is corrupt: entry {number!r} of added_tokens_decoder is not an id with the "
                    '"content" of a token; fetch it again'
                )


def _folder_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Read the chat templates. Newer folders have them in separate files, older ones in tokenizer_config.json."""
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    sources = {path.stem: _read_template(path) for path in more}
    own = folder / "chat_template.jinja"
    if own.is_file():
        return {**sources, "default": _read_template(own)}
    path, found = folder / _SETTINGS, settings.get("chat_template")
    if not found:
        path = folder / "chat_template.json"
        found = _read_json(path).get("chat_template")
    match found:
        case str(source):
            sources["default"] = source
        case [*named]:
            sources |= dict(_named_template(path, entry) for entry in named)
    return sources


def _named_template(path: Path, entry: Any) -> tuple[str, str]:
    match entry:
        case {"name": str(name), "template": str(source)}:
            return name, source
        case _:
            raise ConfigError(
                f'{path} is corrupt: an entry of chat_template lacks its "name" or "template"; fetch it again'
            )


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a Jinja template ({error}): fetch it again") from error


def _folder_variables(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    values = {**_read_json(folder / "special_tokens_map.json"), **settings}
    contents = {role: _content(values.get(role)) for role in _ROLES}
    return {role: content for role, content in contents.items() if content is not None}


def _content(token: Any) -> str | None:
    """The content of a special token, which is written as a string or as an object."""
    match token:
        case str(content) | {"content": str(content)}:
            return content
        case _:
            return None


def _template_file(path: str) -> dict[str, str]:
    try:
        return {"default": Path(path).expanduser().read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {path} cannot be read ({error}); give a file with a Jinja template"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ConfigError(f"{path} is not valid JSON ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object: fetch it again")
    return content


def _ids(value: Any) -> set[int]:
    """Ids from a value that is an id or a list of ids; anything else, such as null, gives none."""
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool)}


def _default_sampling(
    otherwise: Mapping[str, float], generation: dict[str, Any], model_path: Path, wish: str
) -> dict[str, float | int]:
    """`otherwise`: the makers' advice where no file has it. `wish`: --generation-config."""
    if wish == AUTO:
        place = model_path / "generation_config.json" if model_path.is_dir() else model_path
        return {**otherwise, **_sampling(generation, place)}
    if wish == NEUTRAL:
        return {}
    file = Path(wish).expanduser() / "generation_config.json"
    if not file.is_file():
        raise ConfigError(
            f"--generation-config {wish} has no generation_config.json: give auto, {NEUTRAL} or a folder with one"
        )
    return _sampling(_read_json(file), file)


def _overridden(text: str) -> dict[str, float | int]:
    """The values of --override-generation-config. Here a bad value is the operator's mistake."""
    found = read_json_object(text, "--override-generation-config")
    for name, value in found.items():
        if name not in _SAMPLING:
            raise ConfigError(f"--override-generation-config has {name[:60]!r}; it can set {', '.join(_SAMPLING)}")
        try:
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            raise ConfigError(f"--override-generation-config: {error.message}") from None
    return found


def _template_variables(text: str) -> dict[str, Any]:
    found = read_json_object(text, "--default-chat-template-kwargs")
    for name in found:
        if name in (*RESERVED, *_ROLES) or not name.isidentifier():
            raise ConfigError(
                f"--default-chat-template-kwargs must not set {quote(name)}: the request or the model sets it"
            )
    return found


def _gguf_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a GGUF file advises, with the names of generation_config.json."""
    found = {name: metadata.get(f"general.sampling.{key}") for name, key in _GGUF_SAMPLING.items()}
    # They are stored in 32 bits: 0.7 would be shown as 0.699999988079071.
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in found.items()}


def _sampling(generation: dict[str, Any], place: Path) -> dict[str, float | int]:
    """The sampling defaults in generation_config.json or a GGUF file. An invalid value is skipped with a warning: it is not the
    operator's mistake, and should not stop the server from starting."""
    advice: dict[str, Any] = {}
    for name in _SAMPLING:
        value: Any = generation.get(name)
        if value is None:
            continue
        if name == "top_k" and isinstance(value, float) and value.is_integer():
            value = int(value)  # 50.0: some tools write all numbers as floats
        try:
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            log.warning("a value in %s is ignored: %s", place, error.message)
        else:
            advice[name] = value
    return advice
