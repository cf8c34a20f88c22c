"""SentencePiece vocabularies, unigram or BPE, through the `sentencepiece` package. The caller provides the model's bytes and the
tokens that were added to it."""

import functools
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.text.tokenize.detokenizer import BytePieces, Detokenizer
from octavo.text.tokenize.special_token_escape import SpecialTokenEscape, any_of, reads_like_control
from octavo.text.tokenize.tokenizer import SPACE_MARK, PairForm, spell_marked

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

# Appended to a model's bytes: a second `normalizer_spec` (field 3) that only says `add_dummy_prefix` (field 3) is false. Protocol
# buffers merge it into the first. The package's own call for this left it in 0.2.3.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """Added tokens, which are cut out of a text before the model sees it."""

    id_of: Mapping[str, int]
    special_ids: frozenset[int]

    @property
    def control_tokens(self) -> list[str]:
        return [
            token for token, token_id in self.id_of.items() if token_id in self.special_ids or reads_like_control(token)
        ]


class SentencePieceTokenizer:
    """A SentencePiece tokenizer. `prefixes_every_part`: text after an added token is prefixed with a space like the start of the
    text (llama.cpp, and transformers' older behaviour); otherwise only the start is."""

    def __init__(
        self,
        model: bytes,
        added: AddedTokens,
        *,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
        prefixes_every_part: bool = True,
    ) -> None:
        self._processor = _load(model)
        self._model = model
        prefixes = "".join(self._processor.encode("a", out_type=str)).startswith(SPACE_MARK)
        self._bare = self._processor
        if prefixes and not prefixes_every_part:
            self._bare = self._unprefixed
        self._added = added
        self._cut = _cutter(added.id_of)
        self._before = list(before)
        self._after = list(after)
        self._names = {token_id: token for token, token_id in added.id_of.items()}
        self.num_ordinary: int = self._processor.vocab_size()
        self.vocab_size = max(self.num_ordinary, 1 + max(self._names, default=-1))
        self._pieces = BytePieces(self.vocab_size, self._spell, added.special_ids, strips_first_space=prefixes)
        self._insists = _found_by_the_package(self._processor)
        self.lookalikes = SpecialTokenEscape([*added.control_tokens, *self._insists])

    @property
    def pieces(self) -> BytePieces:
        return self._pieces

    @functools.cached_property
    def longest_token(self) -> int:
        names = (self._processor.id_to_piece(token_id) for token_id in range(self._processor.vocab_size()))
        return max(map(len, (*names, *self._added.id_of)), default=1)

    # The package releases the GIL, and takes some sixty bytes for each character: no text needs to be encoded in parts.
    def encode(self, text: str, add_special_tokens: bool, max_ids: int | None = None) -> list[int]:
        ids = self._encode(text, _encode)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    @property
    def pair_form(self) -> PairForm | None:
        return None

    def encode_chat(self, text: str, max_ids: int | None = None) -> list[int]:
        return self._encode(text, self._encode_hidden)

    def _encode_hidden(self, processor: "SentencePieceProcessor", part: str) -> list[int]:
        if not self._insists:
            return _encode(processor, self.lookalikes.reveal(part))
        ids: list[int] = []
        for piece in self.lookalikes.after_marks(part):  # the package must never see the complete token
            ids.extend(_encode(processor, self.lookalikes.reveal(piece)))
            processor = self._unprefixed
        return ids

    @functools.cached_property
    def _unprefixed(self) -> "SentencePieceProcessor":
        return _load(self._model + NO_DUMMY_PREFIX)

    def _encode(self, text: str, encode: "Callable[[SentencePieceProcessor, str], list[int]]") -> list[int]:
        ids = []
        processor = self._processor
        for part in self._cut.split(text) if self._cut else [text]:
            added_id = self._added.id_of.get(part)
            if added_id is not None:
                ids.append(added_id)
                processor = self._bare
            elif part:
                ids.extend(encode(processor, part))
                processor = self._bare
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._pieces.decode(token_ids, skip_special_tokens)

    def spell(self, token_id: int) -> bytes:
        return self._pieces.piece(token_id, skip_special_tokens=False)

    def detokenizer(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool, kept: Sequence[str] = ()
    ) -> Detokenizer:
        kept_ids = {token_id for token in kept if (token_id := self.token_id(token)) is not None}
        return self._pieces.detokenizer(prompt_ids, skip_special_tokens, kept_ids)

    def token_id(self, token: str) -> int | None:
        if token in self._added.id_of:
            return self._added.id_of[token]
        token_id = self._processor.piece_to_id(token)
        return None if self._processor.id_to_piece(token_id) != token else token_id

    def token_name(self, token_id: int) -> str | None:
        if token_id in self._names:
            return self._names[token_id]
        return self._processor.id_to_piece(token_id) if 0 <= token_id < self._processor.vocab_size() else None

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._names:
            return spell_marked(self._names[token_id], has_bytes=False)
        if token_id >= self._processor.vocab_size():
            return b""
        return spell_marked(self._processor.id_to_piece(token_id), self._processor.is_byte(token_id))


def control_tokens(model: bytes) -> dict[str, int]:
    """The model's own control and unknown tokens, which `sentencepiece` itself never matches in a text."""
    processor = _load(model)
    names = enumerate(_names(processor))
    return {name: i for i, name in names if processor.is_control(i) or processor.is_unknown(i)}


def _encode(processor: "SentencePieceProcessor", text: str) -> list[int]:
    ids: list[int] = processor.encode(text)
    return ids


def _found_by_the_package(processor: "SentencePieceProcessor") -> list[str]:
    """User-defined tokens that read like control tokens: the package itself matches them in every text."""
    names = enumerate(_names(processor))
    return [name for i, name in names if reads_like_control(name) and i in processor.encode(name)]


def _names(processor: "SentencePieceProcessor") -> list[str]:
    try:
        return [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the SentencePiece model cannot be read (a piece is not UTF-8: {error}): fetch it again"
        ) from error


def _load(model: bytes) -> "SentencePieceProcessor":
    from sentencepiece import SentencePieceProcessor  # imported lazily: most vocabularies are of another kind

    try:
        if not model:  # the package would take this as "no model given"
            raise ValueError("it is empty")
        return SentencePieceProcessor(model_proto=model)
    except Exception as error:  # the package raises RuntimeError and others for whatever it cannot read
        reason = str(error).partition("\n")[0] or "it is no such model"
        raise ConfigError(f"the SentencePiece model cannot be read ({reason}): fetch it again") from error


def _cutter(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that splits a text into added tokens and the text between them; at one position, the longest token wins."""
    pattern = any_of(tokens)
    return re.compile(f"({pattern})") if pattern else None


# ── writing a model: the few fields of sentencepiece_model.proto that an encoder reads ────────────────────

_NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_BPE = 2


def write_bpe_model(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, unknown_id: int, dummy_prefix: bool
) -> bytes:
    """Write a BPE model that merges the best-scoring pair, leftmost first, as llama.cpp does with a GGUF vocabulary."""
    seen: set[str] = set()
    pieces = []
    for token_id, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
        if token_id == unknown_id:
            kind = UNKNOWN
        elif kind == UNKNOWN:  # the package allows only one
            kind = UNUSED
        name = token.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if not name or name in seen:
            name, kind = f"[NAMELESS_{token_id}]", UNUSED
        seen.add(name)
        pieces.append(_bytes(1, _bytes(1, name.encode()) + b"\x15" + struct.pack("<f", score) + _varint(3, kind)))
    has_bytes = all(f"<0x{byte:02X}>" in seen for byte in range(256))
    trainer = _varint(3, _BPE) + _varint(35, has_bytes) + _varint(40, unknown_id)
    normalizer = _bytes(1, b"identity") + _varint(3, dummy_prefix) + _varint(4, False) + _varint(5, True)
    return b"".join(pieces) + _bytes(2, trainer) + _bytes(3, normalizer)


def _number(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3) + _number(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(value)) + value
