"""The chat over an engine that plays a script: conversations are kept, edited, made again, searched, exported and imported; what
fails leaves everything as it was; and it can be used by keyboard and on a phone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import keep, unnamed, until
from tests.browser.scripted import MODEL, SAY, ScriptedServer, turns_of

STORED = """() => new Promise((resolve) => {{
  const opened = indexedDB.open("octavo");
  opened.onsuccess = () => {{
    const read = opened.result.transaction("talks").objectStore("talks").getAll();
    read.onsuccess = () => resolve(read.result.some((talk) => Object.values(talk.nodes).some((node) => node.stream && node.text === "{text}")));
  }};
}})"""
"""Whether a conversation is stored with an answer that has this text so far, and with the stream that it comes from."""


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.stop()


@pytest.fixture
def chat(open_page: Any, server: ScriptedServer) -> Iterator[Any]:
    page = open_page("/play")
    ready(page)
    yield page
    server.release()


def ready(page: Any) -> None:
    page.wait_for_selector("body[data-ready=yes]")


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.click("#send")


def finished(page: Any) -> None:
    until(page, "document.getElementById('status').textContent.startsWith('finished')")


def say(page: Any, text: str) -> None:
    """Ask, and wait for the whole answer."""
    before = page.locator(".message").count()
    ask(page, SAY + text)
    until(page, f"document.querySelectorAll('.message').length === {before + 2}")
    finished(page)


def texts(page: Any) -> list[str]:
    """The messages on the page."""
    return list(page.eval_on_selector_all(".message > .text", "all => all.map(one => one.innerText.trim())"))


def test_it_is_ready_to_write_and_shows_the_models_own_defaults(chat: Any) -> None:
    assert chat.evaluate("document.activeElement.id") == "prompt"
    assert chat.input_value("#model") == MODEL and MODEL in chat.inner_text("#welcome-note")
    assert chat.get_attribute("#temperature", "placeholder") == "0.6 (model)"
    assert chat.get_attribute("#top_k", "placeholder") == "20 (model)"
    assert chat.get_attribute("#top_p", "placeholder") == "1"
    assert chat.get_attribute("#max_tokens", "placeholder") == "until the end"
    assert unnamed(chat) == [], "a screen reader could not name them"


def test_an_empty_limit_is_the_models_end_and_settings_are_sent(chat: Any, server: ScriptedServer) -> None:
    say(chat, "hello")
    request = server.requests[-1]
    assert request.params.max_tokens == 20_000 - len(request.prompt_ids), "until the end of the context"
    assert request.params.temperature == 0.6 and request.params.top_k == 20
    chat.click("#settings-open")
    chat.fill("#max_tokens", "3")
    chat.fill("#temperature", "0")
    chat.fill("#system", "Be short.")
    say(chat, "abcdef")
    request = server.requests[-1]
    assert (request.params.max_tokens, request.params.temperature) == (3, 0)
    assert turns_of(request)[0] == "system: Be short.\n" and texts(chat)[-1] == "abc"
    assert "reached the limit" in chat.inner_text(".message.last .stats")
    chat.click("text=Continue")
    until(chat, "[...document.querySelectorAll('.message > .text')].at(-1).innerText.trim() === 'abcdef'")
    assert turns_of(server.requests[-1])[-1] == "assistant: abc", "it continues its own text"
    assert len(texts(chat)) == 4
    chat.click("#reset")
    assert chat.input_value("#system") == "" and chat.input_value("#max_tokens") == ""


def test_conversations_are_kept_named_searched_and_deleted(chat: Any) -> None:
    say(chat, "the first answer")
    chat.click("#new")
    assert texts(chat) == [] and chat.is_visible("#welcome")
    say(chat, "the *second* answer")
    titles = ".talk-title"
    assert chat.locator(titles).all_inner_texts() == ["say: the *second* answer", "say: the first answer"]
    chat.reload()
    ready(chat)
    assert texts(chat) == ["say: the *second* answer", "the second answer"], "the address names the conversation"
    chat.click(".talk-open >> nth=1")
    until(chat, "document.querySelector('.message.assistant').innerText.includes('first')")
    # Rename, by the menu and by F2.
    chat.hover(".talk >> nth=1")
    chat.click(".talk-more >> nth=1")
    chat.click(".talk-menu >> text=Rename")
    chat.fill(".rename", "About tea")
    chat.press(".rename", "Enter")
    until(chat, "document.title === 'About tea · Octavo'")
    say(chat, "more")
    assert chat.locator(titles).first.inner_text() == "About tea", "a name that was given stays; the latest is first"
    # Search: in names and in texts.
    for words, found in (("tea", ["About tea"]), ("second answer", ["say: the *second* answer"]), ("nowhere", [])):
        chat.fill("#search", words)
        until(
            chat,
            f"JSON.stringify([...document.querySelectorAll('{titles}')].map(one => one.innerText)) === {json.dumps(json.dumps(found, separators=(',', ':')))}",
        )
    assert "No conversation has these words" in chat.inner_text("#no-talks")
    chat.press("#search", "Escape")
    until(chat, f"document.querySelectorAll('{titles}').length === 2")
    # Delete, and take it back.
    chat.focus(".talk-open >> nth=0")
    chat.keyboard.press("Delete")
    until(chat, f"document.querySelectorAll('{titles}').length === 1")
    assert "“About tea” was deleted" in chat.inner_text("#notice") and texts(chat) == []
    chat.click("#notice >> text=Undo")
    until(chat, f"document.querySelectorAll('{titles}').length === 2")
    until(chat, "document.querySelectorAll('.message').length === 4")


def test_a_question_is_edited_and_an_answer_made_again(chat: Any, server: ScriptedServer) -> None:
    say(chat, "one")
    say(chat, "two")
    chat.hover(".message.user >> nth=0")
    chat.click(".message.user >> nth=0 >> [aria-label='Edit and send again']")
    chat.fill(".editor textarea", SAY + "uno")
    chat.press(".editor textarea", "Enter")
    until(chat, "document.querySelectorAll('.message').length === 2")
    finished(chat)
    assert texts(chat) == ["say: uno", "uno"], "what followed the old question belongs to it"
    chat.click("[aria-label='Previous version']")
    until(chat, "document.querySelectorAll('.message').length === 4")
    assert texts(chat) == ["say: one", "one", "say: two", "two"]
    chat.click(".message.last [aria-label='Answer again']")
    until(chat, "document.querySelector('.message.last .siblings')?.innerText.includes('2/2')")
    finished(chat)
    assert turns_of(server.requests[-1])[:3] == ["user: say: one\n", "assistant: one\n", "user: say: two\n"]
    chat.reload()
    ready(chat)
    assert "2/2" in chat.inner_text(".message.last .siblings"), "siblings are kept"
    chat.click(".message.last [aria-label='Previous version']")
    until(chat, "document.querySelector('.message.last .siblings').innerText.includes('1/2')")


def test_a_send_that_fails_leaves_the_text_and_the_conversation_as_they_were(chat: Any, server: ScriptedServer) -> None:
    say(chat, "before")
    chat.click("#settings-open")
    chat.fill("#top_p", "7")  # the server refuses it
    ask(chat, "say: a question that took long to write")
    until(chat, "!document.getElementById('problem').classList.contains('hidden')")
    assert "top_p" in chat.inner_text("#problem-text").lower()
    assert chat.input_value("#prompt") == "say: a question that took long to write"
    assert texts(chat) == ["say: before", "before"]
    chat.fill("#top_p", "")
    chat.click("#problem-again")
    until(chat, "document.querySelectorAll('.message').length === 4")
    finished(chat)
    assert turns_of(server.requests[-1])[0] == "user: say: before\n" and len(turns_of(server.requests[-1])) == 4
    # The model fails before its first token.
    ask(chat, "say: FAIL")
    until(chat, "!document.getElementById('problem').classList.contains('hidden')")
    assert "the model broke" in chat.inner_text("#problem-text").lower() and chat.input_value("#prompt") == "say: FAIL"
    # A mistake in a JSON field is found before anything is sent.
    num_sent = len(server.requests)
    chat.select_option("#format", "json_schema")
    chat.fill("#schema", "{")
    ask(chat, "say: never sent")
    until(chat, "document.getElementById('problem-text').textContent.includes('he schema is not JSON')")
    assert chat.input_value("#prompt") == "say: never sent" and len(server.requests) == num_sent
    chat.select_option("#format", "text")
    # It fails in the middle: what came stays, and can be made again or continued.
    say_half = "HALF of this"
    ask(chat, SAY + say_half)
    until(chat, "document.querySelector('.message.last .note')?.textContent.includes('the model broke')")
    assert texts(chat)[-1] == say_half[: len(say_half) // 2]
    keep(chat, "chat-interrupted")
    chat.click("text=Continue")
    until(chat, f"[...document.querySelectorAll('.message > .text')].at(-1).innerText.trim() === '{say_half}'")
    assert not chat.is_visible(".message.last .note")


def test_a_first_question_that_fails_leaves_no_conversation(chat: Any) -> None:
    ask(chat, "say: FAIL")
    until(chat, "!document.getElementById('problem').classList.contains('hidden')")
    until(chat, "document.querySelectorAll('.talk').length === 0")
    chat.reload()
    ready(chat)
    assert chat.locator(".talk").count() == 0 and chat.is_visible("#no-talks")


def test_an_answer_is_stopped_by_button_and_by_key(chat: Any, server: ScriptedServer) -> None:
    for how in ("button", "key"):
        server.hold_after(3)
        ask(chat, SAY + "abcdefgh")
        until(chat, "[...document.querySelectorAll('.message > .text')].at(-1).innerText.trim() === 'abc'")
        if how == "button":
            chat.click("#stop-button")
        else:
            chat.keyboard.press("Escape")
        until(chat, "document.getElementById('status').textContent === 'stopped'")
        # The engine's part ends, too: the stream would outlive its connection.
        for _ in range(100):
            if not server.engine.num_running:
                break
            chat.wait_for_timeout(50)
        assert server.engine.num_running == 0
        server.release()
        assert texts(chat)[-1] == "abc"
    chat.click("text=Continue")
    until(chat, "[...document.querySelectorAll('.message > .text')].at(-1).innerText.trim() === 'abcdefgh'")


def test_a_stop_before_the_first_token_gives_the_question_back(chat: Any, server: ScriptedServer) -> None:
    server.hold_after(0)
    ask(chat, "say: x")
    until(chat, "document.querySelector('.message.waiting') !== null")
    chat.click("#stop-button")
    until(chat, "document.getElementById('prompt').value === 'say: x'")
    assert texts(chat) == [] and not chat.is_visible("#problem")
    server.release()


def test_a_reload_in_the_middle_reads_on(chat: Any, server: ScriptedServer) -> None:
    server.hold_after(4)
    ask(chat, SAY + "abcdefgh")
    until(chat, "[...document.querySelectorAll('.message > .text')].at(-1)?.innerText.trim() === 'abcd'")
    until(chat, STORED.format(text="abcd"))  # what came is stored now and then
    num_sent = len(server.requests)
    chat.reload()
    ready(chat)
    server.release()
    until(chat, "[...document.querySelectorAll('.message > .text')].at(-1)?.innerText.trim() === 'abcdefgh'")
    finished(chat)
    assert len(server.requests) == num_sent, "nothing was computed twice"
    assert texts(chat) == ["say: abcdefgh", "abcdefgh"]


def test_a_server_that_is_away_is_named_and_nothing_is_lost(open_page: Any, server: ScriptedServer) -> None:
    page = open_page("/play")
    ready(page)
    say(page, "there")
    server.stop()
    ask(page, "say: are you there?")
    until(page, "document.getElementById('problem-text').textContent.includes('cannot be reached')")
    assert page.input_value("#prompt") == "say: are you there?" and texts(page) == ["say: there", "there"]
    keep(page, "chat-error")
    server.start()
    page.click("#problem-again")
    until(page, "document.querySelectorAll('.message').length === 4")
    finished(page)


def test_export_and_import(chat: Any, tmp_path: Path) -> None:
    say(chat, "**kept**")
    chat.click(".message.last [aria-label='Answer again']")
    until(chat, "document.querySelector('.message.last .siblings')?.innerText.includes('2/2')")
    finished(chat)
    with chat.expect_download() as download:
        chat.click("#export")
    file = tmp_path / "all.json"
    download.value.save_as(file)
    written = json.loads(file.read_text())
    assert written["format"] == "octavo-chats" and len(written["conversations"][0]["nodes"]) == 3
    chat.hover(".talk")
    chat.click(".talk-more")
    with chat.expect_download() as download:
        chat.click(".talk-menu >> text=Export as Markdown")
    download.value.save_as(tmp_path / "one.md")
    assert "## You\n\nsay: **kept**\n\n## Assistant\n\n**kept**" in (tmp_path / "one.md").read_text()
    chat.set_input_files("#import-field", file)
    until(chat, "document.querySelectorAll('.talk').length === 2")
    chat.click(".talk-open >> nth=1")
    until(chat, "document.querySelector('.message.last .siblings')?.innerText.includes('2/2')")
    assert texts(chat) == ["say: **kept**", "kept"]


BAD_IMPORTS: dict[str, tuple[Any, str]] = {
    "not JSON": (b"\x00\xff", "it is not JSON"),
    "another's": ([{"mapping": {}}], "it was not exported by this page"),
    "no list": ({"format": "octavo-chats", "conversations": 7}, "it was not exported by this page"),
    "no messages": ({"format": "octavo-chats", "conversations": [{"title": "x"}]}, "has no messages"),
    "a role": ({"format": "octavo-chats", "conversations": [{"nodes": {"a": {"role": "system", "parent": "root"}}}]}, "must be user, assistant or tool"),
    "an orphan": ({"format": "octavo-chats", "conversations": [{"nodes": {"a": {"role": "user", "parent": "b"}}}]}, "not in the file"),
    "a circle": ({"format": "octavo-chats", "conversations": [{"nodes": {"a": {"role": "user", "parent": "b"}, "b": {"role": "user", "parent": "a"}}}]}, "in a circle"),
    "itself": ({"format": "octavo-chats", "conversations": [{"nodes": {"__proto__": {"role": "user", "parent": "__proto__"}}}]}, "in a circle"),
    "too many": ({"format": "octavo-chats", "conversations": [{"nodes": {str(number): {"role": "user", "parent": "root"} for number in range(10_001)}}]}, "at most 10000"),
    "one bad of two": ({"format": "octavo-chats", "conversations": [{"nodes": {"a": {"role": "user", "parent": "root"}}}, {}]}, "has no messages"),
}  # fmt: skip


def test_a_bad_import_changes_nothing_and_says_why(chat: Any, tmp_path: Path) -> None:
    for name, (content, words) in BAD_IMPORTS.items():
        file = tmp_path / f"{name}.json"
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        chat.set_input_files("#import-field", file)
        until(chat, f"document.getElementById('notice').textContent.includes({json.dumps(words)})")
        assert f"{name}.json was not imported" in chat.inner_text("#notice")
        assert chat.locator(".talk").count() == 0


def test_files_are_context_and_what_is_no_text_is_refused(chat: Any, server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Notes\n\n```\nfenced\n```\n")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    (tmp_path / "large.txt").write_bytes(b"a" * (2 * 2**20 + 1))
    chat.set_input_files("#file-field", [tmp_path / "notes.md", tmp_path / "photo.png"])
    until(chat, "document.getElementById('problem-text').textContent.includes('photo.png is not text')")
    chat.set_input_files("#file-field", tmp_path / "large.txt")
    until(chat, "document.getElementById('problem-text').textContent.includes('at most 2 MiB')")
    assert chat.locator(".chip").all_inner_texts() == ["notes.md"]
    say(chat, "read")
    sent = turns_of(server.requests[-1])[0]
    assert sent == "user: File notes.md:\n````\n# Notes\n\n```\nfenced\n```\n\n````\n\nsay: read\n"
    assert "notes.md" in chat.inner_text(".message.user .file") and chat.locator(".chip").count() == 0
    # A long paste becomes a file.
    chat.focus("#prompt")
    chat.evaluate("() => { const data = new DataTransfer(); data.setData('text/plain', 'x'.repeat(5000)); document.getElementById('prompt').dispatchEvent(new ClipboardEvent('paste', { clipboardData: data, cancelable: true, bubbles: true })); }")  # fmt: skip
    assert chat.locator(".chip").all_inner_texts() == ["pasted-1.txt"]
    chat.click("[aria-label='Remove pasted-1.txt']")
    assert chat.locator(".chip").count() == 0


def test_system_prompt_presets(chat: Any, server: ScriptedServer) -> None:
    chat.click("#settings-open")
    chat.select_option("#preset", "Short answers")
    assert chat.input_value("#system").startswith("Answer in as few words")
    chat.fill("#system", "Speak like a pirate.")
    assert chat.input_value("#preset") == "*"
    chat.on("dialog", lambda dialog: dialog.accept("Pirate"))
    chat.click("#preset-save")
    assert chat.input_value("#preset") == "Pirate"
    say(chat, "ahoy")
    assert turns_of(server.requests[-1])[0] == "system: Speak like a pirate.\n"
    chat.reload()
    ready(chat)
    assert chat.input_value("#system") == "Speak like a pirate." and chat.input_value("#preset") == "Pirate"
    chat.click("#new")
    assert chat.input_value("#preset") == "Pirate", "a new chat begins with the last settings"
    chat.click("#settings-open")
    chat.click("#preset-remove")
    assert chat.input_value("#preset") == "*" and chat.input_value("#system") == "Speak like a pirate."


def test_by_keyboard_alone(chat: Any) -> None:
    chat.keyboard.type("say: keys")
    chat.keyboard.press("Shift+Enter")
    chat.keyboard.type("and more")
    chat.keyboard.press("Enter")
    finished(chat)
    assert texts(chat)[0] == "say: keys\nand more"
    chat.keyboard.press("ArrowUp")
    assert chat.evaluate("document.activeElement.closest('.editor') !== null")
    chat.keyboard.press("Escape")
    chat.keyboard.press("Control+Shift+O")
    assert texts(chat) == [] and chat.evaluate("document.activeElement.id") == "prompt"
    chat.keyboard.press("Control+k")
    assert chat.evaluate("document.activeElement.id") == "search"
    chat.keyboard.press("ArrowDown")
    chat.keyboard.press("Enter")
    until(chat, "document.querySelectorAll('.message').length === 2")
    chat.keyboard.press("Control+.")
    assert chat.is_visible("#controls")
    chat.keyboard.press("Control+i")
    assert chat.is_visible("#code") and "curl -N http://127.0.0.1" in chat.inner_text("#code")
    chat.keyboard.press("Escape")
    assert not chat.is_visible("#panel")
    chat.keyboard.press("Control+b")
    assert chat.evaluate("document.getElementById('sidebar').inert")
    chat.keyboard.press("Control+b")
    chat.evaluate("document.activeElement.blur()")
    chat.keyboard.press("?")
    assert chat.is_visible("#keys")
    chat.keyboard.press("Escape")
    chat.keyboard.press("/")
    assert chat.evaluate("document.activeElement.id") == "prompt"


def test_on_a_phone_the_answer_is_in_view_and_all_else_in_drawers(open_page: Any) -> None:
    page = open_page("/play", is_phone=True)
    ready(page)
    assert page.evaluate("document.getElementById('sidebar').inert") and not page.is_visible("#panel")
    ask(page, SAY + "\n\n".join(f"Paragraph {number} of a long answer." for number in range(40)))
    finished(page)
    page.wait_for_timeout(100)
    box = page.locator(".message.last .text > :last-child").bounding_box()
    composer = page.locator("#ask").bounding_box()
    assert box["y"] + box["height"] < composer["y"] < 780, "the end of the answer is above the field"
    assert composer["y"] + composer["height"] <= 780
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "nothing sticks out"
    page.click("#sidebar-open")
    assert not page.evaluate("document.getElementById('sidebar').inert")
    page.click(".talk-open")
    until(page, "document.getElementById('sidebar').inert")
    page.click("#settings-open")
    box = page.locator("#panel").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 391
    page.mouse.click(5, 400)  # beside the drawer
    assert not page.is_visible("#panel")
    page.fill("#prompt", "line")
    page.press("#prompt", "Enter")
    assert page.input_value("#prompt") == "line\n", "Enter is a new line where there is no Shift"


def test_two_tabs_see_each_others_conversations(chat: Any) -> None:
    other = chat.context.new_page()
    other.goto(chat.url.partition("#")[0])
    ready(other)
    say(chat, "from one tab")
    until(other, "document.querySelectorAll('.talk').length === 1")
    other.click(".talk-open")
    until(other, "document.querySelectorAll('.message').length === 2")
    say(other, "from the other")
    until(chat, "document.querySelectorAll('.message').length === 4")


def test_copy_gives_the_source(chat: Any) -> None:
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    say(chat, "**a**\n\n```py\nx = 1\n```")
    chat.click(".message.last .bar [aria-label='Copy']")
    until(chat, "document.querySelector('.message.last .bar [data-copied=yes]') !== null")
    assert chat.evaluate("navigator.clipboard.readText()") == "**a**\n\n```py\nx = 1\n```"
    chat.click(".message.last [aria-label='Copy code']")
    until(chat, "document.querySelector('figcaption [data-copied=yes]') !== null")
    assert chat.evaluate("navigator.clipboard.readText()") == "x = 1"
