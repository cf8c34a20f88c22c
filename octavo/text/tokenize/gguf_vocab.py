"""The tokenizer of a GGUF file, from its metadata: also its end-of-sequence ids and the variables of its chat template.
pretokenizers.py has the patterns that cut a text into words for BPE."""

import itertools
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from octavo.errors import ConfigError
from octavo.text.tokenize import pretokenizers
from octavo.text.tokenize.detokenizer import BytePieces
from octavo.text.tokenize.sentencepiece_vocab import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    AddedTokens,
    SentencePieceTokenizer,
    write_bpe_model,
)
from octavo.text.tokenize.tokenizer import SPACE_MARK, LibraryTokenizer, Tokenizer, byte_level_pieces, spell_marked

_PREFIX = "tokenizer.ggml."

# Tokens that end a message or a text, by name. A file may declare only one of the two, and a model that continues a plain text
# ends it with the other.
_ENDS = (
    *(
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|eom_id|>",
        "<|return|>",
        "<|call|>",
        "[e~[",
    ),
    *("<|endoftext|>", "<|end_of_text|>", "<eos>", "<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
)

# Files of these kinds claim byte-level BPE but have merges over raw characters.
_MARKED = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")

# Names that converters give to ids that the model's own tokenizer does not have.
_FILLER = re.compile(r"\[PAD\d+\]")


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The file's checked lists of tokens and types. Every token has a name."""

    tokens: list[str]
    types: list[int]
    metadata: dict[str, Any]

    def value(self, key: str, otherwise: Any = None) -> Any:
        return self.metadata.get(_PREFIX + key, otherwise)

    def id(self, key: str) -> int | None:
        """The id of a role ("bos", "eos", …) in the metadata. None: it has none, or one outside the vocabulary."""
        token_id = self.value(f"{key}_token_id")
        return token_id if isinstance(token_id, int) and 0 <= token_id < len(self.tokens) else None

    def around(self, adds_bos: bool, adds_separator: bool = False) -> tuple[list[int], list[int]]:
        """Return the ids to put before and after a text. The arguments are defaults for what the file does not specify."""
        bos, eos = self.id("bos"), self.id("eos")
        if adds_separator:  # as BERT does: a text begins with the class token and ends with a separator
            bos, eos = self._named("cls", "[CLS]") if bos is None else bos, self._named("seperator", "[SEP]")
        before = [bos] if bos is not None and self.value("add_bos_token", adds_bos) else []
        wants_end = self.value("add_sep_token", True) if adds_separator else self.value("add_eos_token", False)
        return before, [eos] if eos is not None and wants_end else []

    def _named(self, role: str, token: str) -> int | None:
        found = self.id(role)
        return self.tokens.index(token) if found is None and token in self.tokens else found

    def added(self) -> AddedTokens:
        """Tokens that are matched literally in a text. Control tokens are special: they are left out of decoded text."""
        unknown = self.id("unknown")
        special = {i for i, kind in enumerate(self.types) if kind in (CONTROL, UNKNOWN)}
        id_of = {
            token: i
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if (kind in (CONTROL, USER_DEFINED) or i == unknown) and not _FILLER.fullmatch(token)
        }
        return AddedTokens(id_of, frozenset(special))


def read_vocabulary(metadata: dict[str, Any]) -> GgufVocabulary:
    tokens = metadata.get(_PREFIX + "tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ConfigError(
            "the GGUF file holds no vocabulary; give --tokenizer a folder with the model's tokenizer.json"
        )
    types = metadata.get(_PREFIX + "token_type") or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        found = len(types) if isinstance(types, list) else "no list of"
        raise ConfigError(f"the GGUF vocabulary has {len(tokens)} tokens but {found} token types: fetch it again")
    return GgufVocabulary([token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)], types, metadata)


def gguf_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    kind = vocabulary.value("model")
    try:
        match kind:
            case "gpt2" if vocabulary.value("pre") in _MARKED:
                return _marked_bpe(vocabulary)
            case "gpt2":
                return _byte_level(vocabulary)
            case "bert":
                return _word_piece(vocabulary)
            case "llama":
                return _sentencepiece(vocabulary)
            case "gemma4":
                return _marked_bpe(vocabulary)
    except ConfigError:
        raise
    except Exception as error:  # the libraries raise bare Exception for inconsistent tables
        raise ConfigError(f"the GGUF vocabulary is inconsistent ({error}): fetch the file again") from error
    raise ConfigError(
        f"the GGUF vocabulary is of kind {kind!r}; gpt2, llama, bert and gemma4 are supported: "
        "give --tokenizer a folder with the model's tokenizer.json"
    )


def gguf_eos_ids(vocabulary: GgufVocabulary) -> tuple[int, ...]:
    ids = {vocabulary.id(role) for role in ("eos", "eot", "eom")}
    id_of = vocabulary.added().id_of
    ends = [token for token in _ENDS if token in id_of]
    if "<|return|>" in id_of and "<|end|>" in ends:
        ends.remove("<|end|>")  # gpt-oss: it ends a message within the output
    ids.update(id_of[token] for token in ends)
    return tuple(sorted(token_id for token_id in ids if token_id is not None))


def gguf_template_variables(vocabulary: GgufVocabulary) -> dict[str, str]:
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: vocabulary.id(role) for name, role in roles.items()}
    return {name: vocabulary.tokens[token_id] for name, token_id in found.items() if token_id is not None}


def gguf_chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    names = metadata.get("tokenizer.chat_templates")
    names = names if isinstance(names, list) else []
    found = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names if isinstance(name, str)}
    if metadata.get("tokenizer.chat_template"):
        found["default"] = metadata["tokenizer.chat_template"]
    return {name: source for name, source in found.items() if isinstance(source, str)}


def _byte_level(vocabulary: GgufVocabulary) -> Tokenizer:
    # Files from before the key existed use "default", as in llama.cpp.
    words = pretokenizers.words_named(vocabulary.value("pre", "default"))
    tokenizer = tokenizers.Tokenizer(_bpe(vocabulary, ignore_merges=words.ignore_merges, byte_fallback=False))
    tokenizer.normalizer = pretokenizers.normalizer(words)
    tokenizer.pre_tokenizer = pretokenizers.pre_tokenizer(words)
    added = vocabulary.added()
    _add(tokenizer, added)
    literal = {token_id: token for token, token_id in added.id_of.items()}
    names = _Names(vocabulary.tokens)
    pieces = byte_level_pieces(names.__getitem__, literal, added.special_ids, len(vocabulary.tokens))
    before, after = vocabulary.around(words.adds_bos)
    return LibraryTokenizer(tokenizer, len(vocabulary.tokens), pieces, before, after)


class _Names:
    """All token names in one string. A list of strings would take five times the memory, in every API process."""

    def __init__(self, names: Sequence[str]) -> None:
        self._all = "".join(names)
        self._ends = array("I", itertools.accumulate(len(name) for name in names))

    def __getitem__(self, token_id: int) -> str:
        return self._all[self._ends[token_id - 1] if token_id else 0 : self._ends[token_id]]


def _marked_bpe(vocabulary: GgufVocabulary) -> Tokenizer:
    """BPE with merges over raw characters, where ▁ is a space: a SentencePiece vocabulary with explicit merges."""
    tokenizer = tokenizers.Tokenizer(_bpe(vocabulary, ignore_merges=False, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE_MARK)
    # A run of newlines is one token if the vocabulary has it, so it must not be merged with its neighbours.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    added = vocabulary.added()
    _add(tokenizer, added)
    tokens = vocabulary.tokens
    pieces = BytePieces(
        len(tokens), lambda i: spell_marked(tokens[i], has_bytes=True), added.special_ids, strips_first_space=False
    )
    before, after = vocabulary.around(adds_bos=True)
    return LibraryTokenizer(tokenizer, len(tokens), pieces, before, after)


def _word_piece(vocabulary: GgufVocabulary) -> Tokenizer:
    """BERT's WordPiece as converters write it: ▁ before a token that starts a word, nothing before one that continues it."""
    tokens, added = vocabulary.tokens, vocabulary.added()
    lowercase = bool(vocabulary.value("normalizer.lowercase", True))
    unknown = vocabulary.id("unknown")
    names = [
        token if kind in (CONTROL, UNKNOWN) else token[1:] if token.startswith(SPACE_MARK) else f"##{token}"
        for token, kind in zip(tokens, vocabulary.types, strict=True)
    ]
    model = models.WordPiece(
        {_valid(name, i): i for i, name in enumerate(names)},
        unk_token="[UNK]" if unknown is None else names[unknown],
        max_input_chars_per_word=100,  # as in BERT's own tokenizer.json: a longer word is unknown
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=bool(vocabulary.value("normalizer.strip_accents", lowercase))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    _add(tokenizer, added)
    pieces = BytePieces(
        len(tokens), lambda i: spell_marked(tokens[i], has_bytes=False), added.special_ids, strips_first_space=True
    )
    before, after = vocabulary.around(adds_bos=True, adds_separator=True)
    return LibraryTokenizer(tokenizer, len(tokens), pieces, before, after)


def _sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    unknown = vocabulary.id("unknown")
    added = vocabulary.added()
    control_ids = {added.id_of[token] for token in added.control_tokens}
    model = write_bpe_model(
        vocabulary.tokens,
        vocabulary.value("scores") or [0.0] * len(vocabulary.tokens),
        # Control tokens are cut out of a text before the package sees it; the rest must never become one.
        [CONTROL if i in control_ids else kind for i, kind in enumerate(vocabulary.types)],
        unknown_id=0 if unknown is None else unknown,
        dummy_prefix=bool(vocabulary.value("add_space_prefix", True)),
    )
    before, after = vocabulary.around(adds_bos=True)
    return SentencePieceTokenizer(model, added, before=before, after=after)


def _bpe(vocabulary: GgufVocabulary, *, ignore_merges: bool, byte_fallback: bool) -> models.BPE:
    merges = vocabulary.value("merges")
    if not merges:
        raise ConfigError(
            "the GGUF vocabulary has no merges; give --tokenizer a folder with the model's tokenizer.json"
        )
    return models.BPE(
        vocab={_valid(token, i): i for i, token in enumerate(vocabulary.tokens)},
        merges=[tuple(merge.split(" ", 1)) for merge in merges],
        ignore_merges=ignore_merges,
        byte_fallback=byte_fallback,
    )


def _valid(token: str, token_id: int) -> str:
    """A name that the library accepts: it requires valid Unicode. A token that is not cannot occur in a text either."""
    return token if token.isascii() or not any("\ud800" <= c <= "\udfff" for c in token) else f"[BYTES_{token_id}]"


def _add(tokenizer: tokenizers.Tokenizer, added: AddedTokens) -> None:
    by_kind: dict[bool, list[AddedToken]] = {True: [], False: []}
    for token, token_id in added.id_of.items():
        special = token_id in added.special_ids
        by_kind[special].append(AddedToken(_valid(token, token_id), special=special, normalized=False))
    tokenizer.add_special_tokens(by_kind[True])
    tokenizer.add_tokens(by_kind[False])
