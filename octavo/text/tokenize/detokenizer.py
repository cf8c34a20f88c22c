"""Token ids → text, one id at a time, never half a character.
Knows nothing of stop strings, of templates or of how the ids were chosen.

The whole decode, for a vocabulary whose ids stand for bytes, is: the bytes of all ids one after another, read as UTF-8,
every invalid sequence replaced by U+FFFD. Where the vocabulary puts a space before the first word (SentencePiece), one
space at the very start of a text is not part of it. What a stream emits for a prompt's continuation is decode(prompt
and output) without the finished characters of the prompt: the first output token keeps its space, because it does not
start the text, unless the prompt holds no text at all; and a character that the prompt's last ids begin comes whole
with the output that ends it. A stream's pieces concatenate to exactly that, whatever the ids.

Two cases differ from the `tokenizers` library on purpose. A run of byte tokens that is not UTF-8 loses only its
invalid part here; there it becomes one U+FFFD a byte, back to the first, which no stream could know in time. An added
token is always its own literal text; there it passes through the byte alphabet, which garbles the non-ASCII ones.
"""

import codecs
import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from encodings.utf_8 import IncrementalDecoder as Utf8Decoder
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_UNFINISHED = 3  # bytes of a character that lacks its last


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before."""

    def flush(self) -> str:
        """What was held back, at the end: an unfinished character becomes U+FFFD."""


class BytePieces:
    """Which bytes each id adds to a text. `spell` says so once for each id; an id outside the vocabulary adds none."""

    def __init__(
        self, size: int, spell: Callable[[int], bytes], special_ids: frozenset[int], strips_first_space: bool
    ) -> None:
        self._pieces: list[bytes | None] = [None] * size
        self._spell = spell
        # The text of each id met so far whose bytes are whole characters: in between characters it needs no decoder.
        # Special ids, which some streams skip, are not among them.
        self.whole: dict[int, str] = {}
        self.special_ids = special_ids
        self.strips_first_space = strips_first_space

    def piece(self, token_id: int, skip_special_tokens: bool) -> bytes:
        if skip_special_tokens and token_id in self.special_ids:
            return b""
        if not 0 <= token_id < len(self._pieces):
            return b""
        piece = self._pieces[token_id]
        if piece is None:
            piece = self._pieces[token_id] = self._spell(token_id)
            if token_id not in self.special_ids:
                with contextlib.suppress(UnicodeDecodeError):
                    self.whole[token_id] = piece.decode()
        return piece

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        text = b"".join([self.piece(token_id, skip_special_tokens) for token_id in token_ids])
        if self.strips_first_space:
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def detokenizer(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool, kept_ids: Collection[int] = ()
    ) -> "ByteDetokenizer":
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self.piece(token_id, skip_special_tokens) + tail
            if len(tail) >= MAX_UNFINISHED:
                break
        return ByteDetokenizer(self, skip_special_tokens, tail, kept_ids)


class ByteDetokenizer:
    """The incremental twin of BytePieces.decode: a table look-up and a UTF-8 decoder that keeps unfinished characters.

    `tail`: the last bytes of the prompt, MAX_UNFINISHED at least where it has as many. They hold all of a character
    that is not finished, and no byte before them could change what becomes of it. `kept_ids`: special ones that are not
    skipped.
    """

    def __init__(
        self, pieces: BytePieces, skip_special_tokens: bool, tail: bytes, kept_ids: Collection[int] = ()
    ) -> None:
        self._pieces = pieces
        self._skip_special_tokens = skip_special_tokens
        self._kept_ids = kept_ids
        self._strip_next = pieces.strips_first_space and not tail
        self._whole = pieces.whole
        self._utf8: codecs.BufferedIncrementalDecoder = Utf8Decoder("replace")
        self._utf8.decode(tail)

    def push(self, token_id: int) -> str:
        if not (self._strip_next or self._utf8.buffer) and (text := self._whole.get(token_id)) is not None:
            return text
        piece = self._pieces.piece(token_id, self._skip_special_tokens and token_id not in self._kept_ids)
        if not piece:
            return ""
        if self._strip_next:
            self._strip_next = False
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For vocabularies whose decoder is not a table of bytes (WordPiece, suffix BPE): decode a short window twice.

    Exact for decoders that look at a token's neighbours only, which all known ones do. The window reaches from the
    token before the last that was emitted to the newest, so a token costs the same wherever it stands. Unlike above,
    a character that the prompt leaves unfinished is not completed.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(prompt_ids[-4:])  # a few, so that skipped special tokens still leave a neighbour
        self._num_emitted = len(self._window)  # of the window's ids: those whose text is out
        self._emitted_text = decode(self._window)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) or len(text) <= len(self._emitted_text):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        new = text[len(self._emitted_text) :]
        self._window = self._window[self._num_emitted :] or self._window
        self._num_emitted = len(self._window)
        self._emitted_text = self._decode(self._window)
        return new
