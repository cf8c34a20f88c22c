"""ChatTokenizer: a copy of a library tokenizer for rendered chats. It first finds control tokens, then reveals the hidden
look-alikes (special_token_escape.py) and tokenizes them as ordinary text."""

import json
import secrets
from collections.abc import Iterable

import tokenizers
from tokenizers import AddedToken, normalizers

from octavo.text.tokenize.special_token_escape import SpecialTokenEscape, reads_like_control


def is_control(token: AddedToken) -> bool:
    return token.special or reads_like_control(token.content)


class ChatTokenizer:
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
