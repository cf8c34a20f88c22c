"""OfflineTokenizer: a model's tokenizer with the methods of transformers' that scripts use, so that they run unchanged."""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import InvalidRequest
from octavo.text import Text
from octavo.text.chat.template import ChatTemplate


class OfflineTokenizer:
    def __init__(self, text: Text) -> None:
        self._text = text
        variables = text.template_variables
        self.bos_token: str | None = variables.get("bos_token")
        self.eos_token: str | None = variables.get("eos_token")
        self.bos_token_id = self._id_of(self.bos_token)
        self.eos_token_id = self._id_of(self.eos_token)
        if self.eos_token_id is None and text.eos_ids:
            self.eos_token_id = text.eos_ids[0]
            self.eos_token = text.token_names([self.eos_token_id])[0]

    @property
    def vocab_size(self) -> int:
        return self._text.vocab_size

    def __len__(self) -> int:
        return self._text.vocab_size

    @property
    def all_special_ids(self) -> list[int]:
        """Control tokens, as far as the vocabulary marks them."""
        return sorted(self._text.special_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._text.encode(text, add_special_tokens)

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """{"input_ids", "attention_mask"} of a text, or of each of several."""
        texts = [text] if isinstance(text, str) else list(text)
        ids = [self.encode(each, add_special_tokens) for each in texts]
        masks = [[1] * len(each) for each in ids]
        one = isinstance(text, str)
        return {"input_ids": ids[0] if one else ids, "attention_mask": masks[0] if one else masks}

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        return self._text.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(each, skip_special_tokens) for each in sequences]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """Names in the vocabulary: "Ġhello", "▁hello"."""
        if isinstance(ids, int):
            return self._text.token_names([ids])[0]
        return self._text.token_names([int(token) for token in ids])

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self._id_of(tokens)
        return [self._id_of(token) for token in tokens]

    def tokenize(self, text: str) -> list[str | None]:
        return self._text.token_names(self.encode(text, add_special_tokens=False))

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """The prompt of a conversation: token ids, or text with `tokenize=False`; of several, a list of these."""
        if not conversation:
            raise InvalidRequest("the conversation is empty: at least one message is needed", param="conversation")
        text = self._text
        if chat_template is not None:
            text = text.with_template(ChatTemplate({"default": chat_template}, text.template_variables))
        one = isinstance(conversation[0], Mapping)
        several: Any = [conversation] if one else conversation
        calls = [
            text.render_call(each, add_generation_prompt, continue_final_message, tools, variables) for each in several
        ]
        made: list[Any] = [text.encode_called(call) if tokenize else text.rendered(call) for call in calls]
        return made[0] if one else made

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._text.token_id(token)
