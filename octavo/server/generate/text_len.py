"""Checks how much text a request would have tokenized, before any of it is rendered or tokenized."""

from collections.abc import Mapping

from octavo.errors import ContextTooLong, Field
from octavo.server.state.service import Service


def check_text_len(service: Service, num_bytes: int, text: object, field: Field) -> None:
    """Raise ContextTooLong if the strings in `text` are together longer than one request's may be. `num_bytes`: at least as many
    as there can be characters in it."""
    most = service.config.budget.text_len(service.report.max_model_len)
    if num_bytes > most and (found := count_characters(text)) > most:
        raise ContextTooLong(
            field + f" has {found} characters of text; at most {most} are tokenized for one request (--max-text-len)"
        )


def count_characters(value: object) -> int:
    """Characters of all strings in a JSON value, names of members included."""
    total, left = 0, [value]
    while left:
        match left.pop():
            case str(text):
                total += len(text)
            case Mapping() as members:
                left += members.keys()
                left += members.values()
            case list() | tuple() as entries:
                left += entries
    return total
