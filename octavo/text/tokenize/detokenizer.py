"""Detokenizers: token ids to text, one id at a time, never half a character.

For a vocabulary whose ids stand for bytes, the full decode is: concatenate the bytes of all ids and read them as UTF-8, with
every invalid sequence replaced by U+FFFD. If the vocabulary puts a space before the first word (SentencePiece), one space at
the very start of a text is removed. A stream that continues a prompt emits decode(prompt and output) without the complete
characters of the prompt. So the first output token keeps its space, because it does not start the text, unless the prompt
holds no text at all; and a character that begins in the prompt's last ids is emitted with the output that completes it. The
stream's pieces concatenate to exactly that, whatever the ids.

Two cases differ from the `tokenizers` library on purpose. In a run of byte tokens that is not UTF-8, only the invalid part is
replaced here; the library replaces every byte back to the start of the run by U+FFFD, which a stream could not know in time. An
added token is always its own literal text here; the library passes it through the byte alphabet, which garbles non-ASCII ones.
"""

import codecs
import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from encodings.utf_8 import IncrementalDecoder as Utf8Decoder
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_UNFINISHED = 3  # most bytes of an incomplete UTF-8 character


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now complete."""

    def flush(self) -> str:
        """Return the held-back text at the end of the output: an incomplete character becomes U+FFFD."""


class BytePieces:
    """The bytes that each id adds to a text. `spell` is called once for each id; an id outside the vocabulary adds none."""

    def __init__(
        self, size: int, spell: Callable[[int], bytes], special_ids: frozenset[int], strips_first_space: bool
    ) -> None:
        self._pieces: list[bytes | None] = [None] * size
        self._spell = spell
        # Text of each id seen so far whose bytes are complete characters: at a character boundary it needs no decoder.
        # Without special ids, which some streams skip.
        self.complete: dict[int, str] = {}
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
                    self.complete[token_id] = piece.decode()
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
    """The incremental version of BytePieces.decode: a table lookup and a UTF-8 decoder that keeps incomplete characters.

    `tail`: the last bytes of the prompt, at least MAX_UNFINISHED if it has as many. They contain all of an incomplete
    character, and no earlier byte can affect it. `kept_ids`: special ids that are not skipped.
    """

    def __init__(
        self, pieces: BytePieces, skip_special_tokens: bool, tail: bytes, kept_ids: Collection[int] = ()
    ) -> None:
        self._pieces = pieces
        self._skip_special_tokens = skip_special_tokens
        self._kept_ids = kept_ids
        self._strip_next = pieces.strips_first_space and not tail
        self._complete = pieces.complete
        self._utf8: codecs.BufferedIncrementalDecoder = Utf8Decoder("replace")
        self._utf8.decode(tail)

    def push(self, token_id: int) -> str:
        if not (self._strip_next or self._utf8.buffer) and (text := self._complete.get(token_id)) is not None:
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
    """A detokenizer for vocabularies whose decoder is not a table of bytes (WordPiece, suffix BPE): decodes a short window twice.

    It is exact for decoders that look only at a token's neighbours, which all known ones do. The window begins just before
    the newest tokens, so that a token costs the same at any position. Unlike in ByteDetokenizer, a character that the prompt
    leaves incomplete is not completed.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(prompt_ids[-4:])  # more than one, so that skipped special tokens still leave a neighbour
        self._num_emitted = len(self._window)  # ids of the window whose text has been emitted
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
