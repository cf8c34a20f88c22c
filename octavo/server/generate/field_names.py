"""What a dialect calls the fields of a chat request: errors and ignored fields are given back under the dialect's own names."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from octavo.errors import Field, RequestError
from octavo.server.schema.fields import RequestFields

_ENTRY = "[]"  # any entry of a list
_STEP = re.compile(r"\[\]|[^.\[\]]+")


class FieldNames:
    def __init__(self, table: Mapping[str, str]) -> None:
        """`table`: a chat's field → the dialect's, where they differ: {"tools[].function": "tools[]"}. What lies within a field
        keeps its name. The longest match counts."""
        steps = [(_STEP.findall(field), _STEP.findall(name)) for field, name in table.items()]
        self._table = sorted(steps, key=lambda pair: len(pair[0]), reverse=True)

    def of(self, field: Field) -> Field:
        """The dialect's field."""
        steps = [_ENTRY if isinstance(step, int) else step for step in field.path]
        for chats, own in self._table:
            if steps[: len(chats)] == chats:
                numbers = iter([step for step in field.path if isinstance(step, int)])
                head = [next(numbers) if step == _ENTRY else step for step in own]
                return Field(*head, *field.path[len(chats) :])
        return field

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Rename the fields of RequestErrors that are raised within."""
        try:
            yield
        except RequestError as error:
            error.rename(self.of)
            raise

    def ignored(self, fields: RequestFields, chat: RequestFields) -> list[str]:
        """Names of the fields without effect: the request's own, and those of the chat or generation made from it."""
        names = [*fields.ignored, *(str(self.of(field)) for field in chat.passed_over)]
        return [*names, f"and {chat.num_more} more"] if chat.num_more else names
