"""tiktoken vocabularies, which are ranked byte strings: Qwen's first `.tiktoken` files and Mistral's tekken.json.

Such a vocabulary has no merges: of all neighbours whose union is a token, the pair with the lowest rank is joined. That is
equivalent to a merge list with, rank by rank, every pair that forms a token. The library gets that list.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from octavo.errors import ConfigError
from octavo.text.tokenize import pretokenizers
from octavo.text.tokenize.tokenizer import LibraryTokenizer, byte_level_name, byte_level_pieces


@dataclass(frozen=True, slots=True)
class Ranked:
    """A ranked vocabulary. `ids`: the id of every byte string, in the order of ranks. `special`: control tokens; `ordinary`:
    other added tokens."""

    ids: Mapping[bytes, int]
    special: Mapping[str, int]
    ordinary: Mapping[str, int]


def is_tiktoken(start: bytes) -> bool:
    """Whether a file with this beginning has lines of base64 and a rank."""
    first, _, rank = start.partition(b"\n")[0].rstrip(b"\r").partition(b" ")
    try:
        return bool(base64.b64decode(first, validate=True)) and rank.isdigit()
    except binascii.Error:
        return False


_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))


def read_qwen_tiktoken(path: Path) -> LibraryTokenizer:
    """Read Qwen's file. It holds only byte strings; the control tokens follow them, numbered as in the model's own code."""
    ids = _read_lines(path)
    special = {token: len(ids) + at for at, token in enumerate(_QWEN_SPECIAL)}
    words = pretokenizers.words_named("qwen2")
    return _tokenizer(
        path, Ranked(ids, special, {}), pretokenizers.pre_tokenizer(words), pretokenizers.normalizer(words)
    )


def _read_lines(path: Path) -> dict[bytes, int]:
    ids: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ids[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:  # includes binascii.Error
            raise ConfigError(
                f"{path} is not a tiktoken vocabulary: line {number} is not a base64 token and its rank; fetch it again"
            ) from error
    if not ids or sorted(ids.values()) != list(range(len(ids))):
        raise ConfigError(
            f"{path} is cut short or damaged: its ranks do not go from 0 to {len(ids) - 1}; fetch it again"
        )
    return ids


_MOST_SPECIAL = 100_000  # real files have 1,000
# The first ids of older files, which do not contain this list.
_TEKKEN_SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]


def read_tekken(path: Path) -> LibraryTokenizer:
    try:
        content = json.loads(path.read_bytes())
        config = content["config"]
        num_special = int(config["default_num_special_tokens"])
        num_ordinary = int(config["default_vocab_size"]) - num_special
        ids = {
            base64.b64decode(entry["token_bytes"], validate=True): num_special + at
            for at, entry in enumerate(content["vocab"][: max(num_ordinary, 0)])
        }
        named = content.get("special_tokens") or [{"token_str": token} for token in _TEKKEN_SPECIAL]
        names = [str(entry["token_str"]) for entry in named]
        "".join(names).encode()  # a lone surrogate is no text
        is_control = [bool(entry.get("is_control", True)) for entry in named]
        cut = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    except ConfigError:
        raise
    except Exception as error:  # missing keys, wrong types, bad base64, a bad pattern
        raise ConfigError(f"{path} cannot be read as a tekken vocabulary ({_words(error)}): fetch it again") from error
    if num_special > _MOST_SPECIAL:
        raise ConfigError(f"{path} is damaged: it announces {num_special} special tokens; fetch it again")
    if len(ids) != num_ordinary or len(names) > num_special or len(set(names)) < len(names):
        raise ConfigError(
            f"{path} is cut short or damaged: it announces {num_ordinary} tokens and {num_special} special ones, and holds "
            f"{len(ids)} and {len(set(names))}; fetch it again"
        )
    names += [f"<SPECIAL_{i}>" for i in range(len(names), num_special)]
    is_control += [True] * (num_special - len(is_control))
    special = {name: i for i, name in enumerate(names) if is_control[i]}
    ordinary = {name: i for i, name in enumerate(names) if not is_control[i]}
    words = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return _tokenizer(
        path, Ranked(ids, special, ordinary), words, None, before=[special["<s>"]] if "<s>" in special else []
    )


def _words(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0] if str(error) else "?"


def _tokenizer(
    path: Path,
    vocabulary: Ranked,
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None,
    before: list[int] | None = None,
) -> LibraryTokenizer:
    missing = next((byte for byte in range(256) if bytes([byte]) not in vocabulary.ids), None)
    if missing is not None:
        raise ConfigError(f"{path} lacks the byte 0x{missing:02X}, so not every text can be encoded: fetch it again")
    added = {**vocabulary.special, **vocabulary.ordinary}
    names = {byte_level_name(token): token_id for token, token_id in vocabulary.ids.items()}
    if names.keys() & added.keys():
        clash = next(iter(names.keys() & added.keys()))
        raise ConfigError(f"{path} gives {clash!r} two ids, a special one and an ordinary one: fetch it again")
    model = models.BPE(
        vocab=names | added,
        merges=_merges(vocabulary.ids),
        ignore_merges=True,  # a word that is a token is not split
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in vocabulary.special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in vocabulary.ordinary])
    literal = {token_id: token for token, token_id in added.items()}
    name_of = {token_id: name for name, token_id in names.items()}
    size = len(names) + len(added)
    special_ids = frozenset(vocabulary.special.values())
    pieces = byte_level_pieces(lambda token_id: name_of.get(token_id, ""), literal, special_ids, size)
    return LibraryTokenizer(tokenizer, size, pieces, before or [])


def _merges(ids: Mapping[bytes, int]) -> list[tuple[str, str]]:
    merges = []
    for token, _ in sorted(ids.items(), key=lambda item: item[1]):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((byte_level_name(left), byte_level_name(right)))
    return merges
