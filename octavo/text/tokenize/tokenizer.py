"""Tokenizer: the interface between text and token ids, and its implementation on top of the `tokenizers` library."""

import functools
import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tokenizers
from tokenizers import AddedToken, normalizers

from octavo.errors import ConfigError, InvalidRequest
from octavo.text.tokenize.detokenizer import BytePieces, Detokenizer, WindowDetokenizer
from octavo.text.tokenize.special_token_escape import SpecialTokenEscape, reads_like_control
from octavo.text.tokenize.windows import WINDOW, Encode, encode_in_windows

SPACE_MARK = "▁"  # U+2581: stands for a space in SentencePiece vocabularies


# Longer texts are encoded by the library's batch call: it releases the GIL, so that streams continue meanwhile.
_LONG_TEXT = 4_000  # characters


class PairForm(NamedTuple):
    """The ids around and between the two texts of a pair, as the vocabulary asks for."""

    before: list[int]
    between: list[int]
    after: list[int]
    has_types: bool  # tokens of the second text are of another type

    @property
    def num_added(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)


class Tokenizer(Protocol):
    vocab_size: int  # including added tokens
    num_ordinary: int  # without tokens that were added after the vocabulary's own
    lookalikes: SpecialTokenEscape  # for the vocabulary's control tokens

    @property
    def longest_token(self) -> int:
        """Characters in the longest token's name."""

    def encode(self, text: str, add_special_tokens: bool, max_ids: int | None = None) -> list[int]:
        """Encode `text`, which is valid Unicode. Text that reads like a control token becomes one. `add_special_tokens`: add the
        BOS and EOS that the vocabulary asks for. `max_ids`: if there are more, some of them may be missing at the end."""

    @property
    def pair_form(self) -> PairForm | None:
        """How two texts become one prompt. None: the vocabulary does not say it."""

    def encode_chat(self, text: str, max_ids: int | None = None) -> list[int]:
        """Encode a rendered chat with `lookalikes` hidden: hidden look-alikes become ordinary tokens."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode all ids at once, as defined in detokenizer.py."""

    def detokenizer(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool, kept: Sequence[str] = ()
    ) -> Detokenizer:
        """Return a detokenizer for the tokens that follow the prompt. `kept`: special tokens that are not skipped."""

    @property
    def pieces(self) -> BytePieces | None:
        """The bytes that each id adds to a text. None: they depend on the neighbouring ids."""

    def spell(self, token_id: int) -> bytes:
        """Bytes that one token adds in the middle of a text: maybe less than a character. For a control token: its name."""

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, such as "</s>"."""

    def token_name(self, token_id: int) -> str | None:
        """The token's name in the vocabulary. None: no token has this id."""


class LibraryTokenizer:
    """A tokenizer on top of `tokenizers.Tokenizer`. `pieces` None: the library decodes, because its decoder is no table of bytes.

    `before` and `after`: ids to put around an encoded text if the library's own post-processor does not add them.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        vocab_size: int,
        pieces: BytePieces | None,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> None:
        self.vocab_size = vocab_size
        self.num_ordinary: int = tokenizer.get_vocab_size(with_added_tokens=False)
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._before = list(before)
        self._after = list(after)
        self._chat = ChatTokenizer(tokenizer)
        self.lookalikes = self._chat.lookalikes
        self._prepends = has_prepend(tokenizer)

    @property
    def pieces(self) -> BytePieces | None:
        return self._pieces

    @functools.cached_property
    def longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str, add_special_tokens: bool, max_ids: int | None = None) -> list[int]:
        if len(text) > WINDOW:
            before, after = self._special_around if add_special_tokens else ([], [])
            return [*before, *_encode_long(self._tokenizer, self._prepends, text, max_ids), *after]
        ids = _encode(self._tokenizer, text, add_special_tokens)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def encode_chat(self, text: str, max_ids: int | None = None) -> list[int]:
        tokenizer = self._chat.tokenizer
        if len(text) > WINDOW:
            ids = _encode_long(tokenizer, self._prepends, text, max_ids)
        else:
            ids = _encode(tokenizer, text, add_special_tokens=False)
        return self._chat.translate(ids)

    @functools.cached_property
    def _special_around(self) -> tuple[list[int], list[int]]:
        """(ids before, ids after) a text that is encoded with special tokens."""
        inner, ids = self.encode("a", False), self.encode("a", True)
        at = next((at for at in range(len(ids)) if ids[at : at + len(inner)] == inner), 0)
        return ids[:at], ids[at + len(inner) :]

    @functools.cached_property
    def pair_form(self) -> PairForm | None:
        if self._before or self._after:  # no post-processor: its form for one text is known, that for two is not
            return None
        inner = self.encode("a", False)
        pair = self._tokenizer.encode("a", "a")
        ids: list[int] = pair.ids
        starts = [at for at in range(len(ids)) if ids[at : at + len(inner)] == inner]
        if not inner or len(starts) < 2:
            return None
        first, second = starts[0], starts[-1]
        types: list[int] = pair.type_ids
        return PairForm(
            ids[:first],
            ids[first + len(inner) : second],
            ids[second + len(inner) :],
            types[second] != types[first],
        )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        if self._pieces is not None:
            return self._pieces.decode(token_ids, skip_special_tokens)
        return str(self._tokenizer.decode(_known(token_ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool, kept: Sequence[str] = ()
    ) -> Detokenizer:
        kept_ids = {token_id for token in kept if (token_id := self.token_id(token)) is not None}
        if self._pieces is not None:
            return self._pieces.detokenizer(prompt_ids, skip_special_tokens, kept_ids)
        if not (skip_special_tokens and kept_ids):
            return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens), prompt_ids)
        added = self._tokenizer.get_added_tokens_decoder().items()
        skipped = {token_id for token_id, token in added if token.special} - kept_ids
        return WindowDetokenizer(
            lambda ids: self.decode([token_id for token_id in ids if token_id not in skipped], False), prompt_ids
        )

    def spell(self, token_id: int) -> bytes:
        if self._pieces is not None:
            return self._pieces.piece(token_id, skip_special_tokens=False)
        return self.decode([token_id], skip_special_tokens=False).encode("utf-8", "surrogateescape")

    def token_id(self, token: str) -> int | None:
        try:
            token_id: int | None = self._tokenizer.token_to_id(token)
        except UnicodeEncodeError:  # a lone surrogate: no token has one
            return None
        return token_id

    def token_name(self, token_id: int) -> str | None:
        name: str | None = self._tokenizer.id_to_token(token_id)
        return name


class ChatTokenizer:
    """A copy of a library tokenizer for rendered chats. It first finds control tokens, then reveals the hidden look-alikes
    (special_token_escape.py) and tokenizes them as ordinary text."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        by_id = tokenizer.get_added_tokens_decoder()
        self._added = [by_id[token_id] for token_id in sorted(by_id)]  # added in this order, they get the same ids
        control = {token.content: token_id for token_id, token in by_id.items() if is_control(token)}
        self.lookalikes = SpecialTokenEscape(control.keys())
        self._id_of: dict[int, int] = {}  # id in the copy → id in the vocabulary, where they differ
        self.tokenizer = self._twin(tokenizer, tokenizer.model)  # shares the model's tables
        if self._spells(control):
            self.tokenizer = self._twin(tokenizer, _without(tokenizer, control.keys()))
            self._id_of = {
                twin_id: token_id
                for token_id, token in by_id.items()
                if (twin_id := self.tokenizer.token_to_id(token.content)) not in (token_id, None)
            }

    def translate(self, ids: list[int]) -> list[int]:
        return [self._id_of.get(token_id, token_id) for token_id in ids] if self._id_of else ids

    def _twin(self, tokenizer: tokenizers.Tokenizer, model: tokenizers.models.Model) -> tokenizers.Tokenizer:
        twin = tokenizers.Tokenizer(model)
        reveals = [normalizers.Replace(hidden, shown) for hidden, shown in self.lookalikes.reveals]
        own = tokenizer.normalizer
        twin.normalizer = normalizers.Sequence([*reveals, *([] if own is None else [own])])
        if tokenizer.pre_tokenizer is not None:
            twin.pre_tokenizer = tokenizer.pre_tokenizer
        twin.add_tokens([_found_unnormalized(token) for token in self._added])
        return twin

    def _spells(self, control: dict[str, int]) -> bool:
        """Whether the tokenizer's model itself produces a control token from its characters, as a unigram model does that lists
        it."""
        for token, token_id in control.items():
            for text in (token, f"x{token}x", f" {token} "):
                hidden = self.lookalikes.hide(text)
                if token_id in self.tokenizer.encode(hidden, add_special_tokens=False).ids:
                    return True
        return False


def _found_unnormalized(token: AddedToken) -> AddedToken:
    """A copy that is matched before normalizing if it is a control token: normalizing must not create one from other text."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and not is_control(token),
        special=token.special,
    )


def _without(tokenizer: tokenizers.Tokenizer, control: Iterable[str]) -> tokenizers.models.Model:
    """The tokenizer's model with its control tokens renamed to random names that no text contains."""
    state = json.loads(tokenizer.to_str())
    unspeakable = {token: f"{token}{secrets.token_hex(16)}" for token in control}
    unknown = state["model"].get("unk_token")
    if unknown in unspeakable:
        state["model"]["unk_token"] = unspeakable[unknown]
    match state["model"]["vocab"]:
        case dict() as ids:
            state["model"]["vocab"] = {unspeakable.get(token, token): token_id for token, token_id in ids.items()}
        case [*scores]:
            state["model"]["vocab"] = [[unspeakable.get(token, token), score] for token, score in scores]
    state["added_tokens"], state["post_processor"] = [], None
    model: tokenizers.models.Model = tokenizers.Tokenizer.from_str(json.dumps(state)).model
    return model


def is_control(token: AddedToken) -> bool:
    return token.special or reads_like_control(token.content)


def _encode_long(tokenizer: tokenizers.Tokenizer, prepends: bool, text: str, max_ids: int | None) -> list[int]:
    def encode(part: str) -> list[int]:
        return _encode(tokenizer, part, add_special_tokens=False)

    return encode_in_windows(encode, rest_encoder(encode) if prepends else encode, text, max_ids)


def rest_encoder(encode: Encode) -> Encode:
    """The encoder of text that is not at the beginning, for a tokenizer that puts a space before every text: there the space is the
    text's own. Text that does not begin with one cannot be encoded apart, and gives no ids."""
    return lambda part: encode(part[1:]) if part.startswith(" ") else []


def has_prepend(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the normalizer puts something before every text, as Llama 2's does."""
    normalizer = tokenizer.normalizer
    return normalizer is not None and b'"Prepend"' in normalizer.__getstate__()


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        if len(text) > _LONG_TEXT:
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except Exception as error:  # a bare Exception: the vocabulary has no unknown token, and cannot spell this text
        raise InvalidRequest(f"the model's tokenizer cannot encode this text: {error}") from error
    ids: list[int] = encoding.ids
    return ids


def read_tokenizer_json(path: Path) -> LibraryTokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except (
        BaseException
    ) as error:  # a bare Exception for what the library cannot read, and panics, which are no Exceptions
        raise ConfigError(f"{path} cannot be read as a tokenizer ({error}): fetch it again") from error
    # Some files carry the padding and truncation of training; a server needs each prompt as it is.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer.get_added_tokens_decoder()
    literal = {token_id: token.content for token_id, token in added.items()}
    special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
    vocab_size = max(tokenizer.get_vocab_size(with_added_tokens=True), 1 + max(added, default=-1))
    decoder = tokenizer.decoder
    steps = _decoder_steps(json.loads(decoder.__getstate__())) if decoder is not None else []
    pieces = _pieces_of(steps, tokenizer.id_to_token, literal, special_ids, vocab_size)
    return LibraryTokenizer(tokenizer, vocab_size, pieces)


def _known(token_ids: Iterable[int]) -> list[int]:
    """Drop ids outside the 32-bit range, which the library does not accept. It skips ids that it does not know."""
    return [token_id for token_id in token_ids if 0 <= token_id < 2**32]


def _decoder_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]
    return [decoder]


_STRIP_FIRST_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _pieces_of(
    steps: list[dict[str, Any]],
    name_of: Callable[[int], str | None],
    literal: dict[int, str],
    special_ids: frozenset[int],
    vocab_size: int,
) -> BytePieces | None:
    """The byte table that is equivalent to a decoder: byte-level, or SentencePiece in either notation. None: neither."""
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_pieces(lambda token_id: name_of(token_id) or "", literal, special_ids, vocab_size)
    strips = False
    fused = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "} | {"type": "ByteFallback"}:
                pass
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip"} if fused and step == _STRIP_FIRST_SPACE:
                strips = True
            case {"type": "Metaspace", "replacement": "▁"}:
                strips = strips or step.get("prepend_scheme", "always") != "never"
            case _:
                return None
    if not steps or not ("Metaspace" in kinds or "Replace" in kinds):
        return None
    has_bytes = "ByteFallback" in kinds
    return BytePieces(
        vocab_size, lambda token_id: spell_marked(name_of(token_id) or "", has_bytes), special_ids, strips
    )


def spell_marked(token: str, has_bytes: bool) -> bytes:
    """Bytes of a SentencePiece token: ▁ is a space and <0x41> is the byte 0x41."""
    if has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE_MARK, " ").encode("utf-8", "surrogateescape")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for every byte: the byte itself if it is visible, else the next character from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
_CHARACTERS = "".join(sorted(_BYTE_OF, key=lambda character: _BYTE_OF[character]))


def byte_level_name(token: bytes) -> str:
    """The token's name in a byte-level vocabulary."""
    return token.decode("latin-1").translate(_CHARACTERS)


def byte_level_pieces(
    name_of: Callable[[int], str], literal: dict[int, str], special_ids: frozenset[int], vocab_size: int
) -> BytePieces:
    """Byte table of a byte-level vocabulary. `literal`: tokens that are their own text, not written in the byte alphabet."""

    def spell(token_id: int) -> bytes:
        if token_id in literal:
            return literal[token_id].encode("utf-8", "surrogateescape")
        token = name_of(token_id)
        try:
            return bytes([_BYTE_OF[character] for character in token])
        except KeyError:  # not in the byte alphabet: the library too takes such a token literally
            return token.encode("utf-8", "surrogateescape")

    return BytePieces(vocab_size, spell, special_ids, strips_first_space=False)
