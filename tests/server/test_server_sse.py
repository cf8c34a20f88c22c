"""Events whose surroundings are encoded once are the same bytes as events encoded whole."""

import pytest
from msgspec import UNSET, UnsetType

from octavo.server.dialects.openai_chat.output import ChatChunk, ChunkChoice, Delta
from octavo.server.dialects.openai_completions.output import Choice, Completion
from octavo.server.http.sse import Frames, event

HEAD = ("cmpl-1", 1700000000, 'a "quoted" model\n', "octavo-1-float32-cpu")
TEXTS = ["a", "", ' "\\ \n\x00\x7f', "é€😀", "\u2028\u2029", "</script>", "{}", "\ufffd"]


@pytest.mark.parametrize("usage", [UNSET, None])
@pytest.mark.parametrize("index", [0, 7, 1000])
def test_frames_are_whole_events(usage: UnsetType | None, index: int) -> None:
    completions = Frames(lambda index, text: Completion(*HEAD, [Choice(index, text)], usage))
    chats = Frames(lambda index, text: ChatChunk(*HEAD, [ChunkChoice(index, Delta(content=text))], usage))
    for text in TEXTS * 2:
        assert completions.event(index, text) == event(Completion(*HEAD, [Choice(index, text)], usage))
        assert chats.event(index, text) == event(ChatChunk(*HEAD, [ChunkChoice(index, Delta(content=text))], usage))


def test_each_choice_has_its_own_frame() -> None:
    frames = Frames(lambda index, text: Completion(*HEAD, [Choice(index, text)]))
    assert frames.event(0, "a") != frames.event(1, "a")
    assert frames.event(0, "b") == event(Completion(*HEAD, [Choice(0, "b")]))
