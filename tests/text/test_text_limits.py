"""Texts that are far too long: refused before they are tokenized, without blocking other threads."""

import threading
import time

import pytest

from octavo.errors import ContextTooLong
from tests.doubles import byte_text


def test_a_text_that_cannot_fit_is_refused_unread():
    text = byte_text()
    with pytest.raises(ContextTooLong, match=r"prompt\[3\] has 5000000 characters.*context of 100 tokens") as refusal:
        text.encode("a" * 5_000_000, param="prompt[3]", max_tokens=100)
    assert refusal.value.param == "prompt[3]"
    assert len(text.encode("a" * 100, max_tokens=100)) == 100


def test_chats_have_the_same_limit():
    text = byte_text()
    with pytest.raises(ContextTooLong) as refusal:
        text.encode_chat([{"role": "user", "content": "a" * 5_000_000}], max_tokens=100)
    assert refusal.value.param == "messages"


def test_long_and_short_texts_are_encoded_alike():
    text = byte_text()
    words = "The quick brown fox. ÄÖÜ 日本語 🦊\n" * 400
    parts = [words[i : i + 3000] for i in range(0, len(words), 3000)]
    assert text.encode(words) == [token for part in parts for token in text.encode(part)]


def test_other_threads_run_while_a_long_text_is_encoded():
    text = byte_text()
    stop, ticks = threading.Event(), []

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.perf_counter()
    text.encode("hello world " * 200_000)
    ended = time.perf_counter()
    stop.set()
    thread.join()
    during = [at for at in ticks if started < at < ended]
    assert len(during) > 3, "the interpreter was held for the whole of it"
