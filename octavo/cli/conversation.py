"""The conversation of `octavo chat`: questions and answers, the commands that begin with a slash, and saved conversations."""

import json
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

from octavo.cli.chat import Message, TalkModel
from octavo.cli.quiet_terminal import no_echo
from octavo.cli.terminal_markdown import DIM, RESET, TerminalMarkdown, TerminalText
from octavo.errors import ConfigError, OctavoError

MAX_SAVED_BYTES = 16 * 2**20
MAX_HISTORY_LINES = 1000
UNKNOWN_COLUMNS = 80  # of a terminal that does not tell
QUOTES = '"""'
ROLES = ("system", "user", "assistant")
GREETING = "/help lists commands. Ctrl-C stops an answer, Ctrl-D quits."
HELP = f"""\
  /help           show this
  /system TEXT    set the system message; /system alone shows it, /system clear removes it
  /retry          ask the last question again
  /clear          begin a new conversation, with the same system message
  /save FILE      save the conversation as JSON
  /load FILE      continue a saved conversation
  /exit           quit (also /bye, /quit and Ctrl-D)
  {QUOTES}             begin and end a text of several lines; a line that ends with \\ continues, too
  Ctrl-C          stop the answer; what was said stays in the conversation"""
_HELP_INDENT = 18  # columns before the explanations of HELP


class Conversation:
    """Messages so far, and the questions of one person or one script."""

    def __init__(self, model: TalkModel, system: str | None, out: IO[str], is_styled: bool) -> None:
        """`is_styled`: answers go to a terminal that shows colours: Markdown is rendered."""
        self._model, self._out, self._is_styled = model, out, is_styled
        self.messages: list[Message] = []
        self._set_system(system)

    def ask(self, question: str) -> bool:
        """Ask one question and print the answer. False: the model could not answer; the conversation is as before."""
        self.messages.append({"role": "user", "content": question})
        answer = ""
        painter = self._painter()
        try:
            with no_echo(self._out), closing(_generator(self._model.chat(self.messages))) as pieces:
                for piece in pieces:
                    answer += piece
                    self._write(painter.feed(piece) if painter else piece)
        except KeyboardInterrupt:
            pass
        except OctavoError as error:
            self.messages.pop()  # a question that was not answered must not stay in the history
            self._write(painter.finish() if painter else "")
            print(f"{answer and chr(10)}octavo: error: {' '.join(error.message.split())}", file=sys.stderr)
            return False
        self._write((painter.finish() if painter else "") + "\n")
        self.messages.append({"role": "assistant", "content": answer})
        return True

    def _painter(self) -> TerminalMarkdown | TerminalText | None:
        """How an answer is shown. None: as it comes, because it goes into a file or another program."""
        is_terminal = self._out.isatty()
        if self._is_styled:
            return TerminalMarkdown(self._columns if is_terminal else None)
        return TerminalText(self._columns) if is_terminal else None

    def _columns(self) -> int:
        return _columns(self._out)

    def run_command(self, line: str) -> bool:
        """Run a line that begins with a slash. False: the conversation is to end."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        match name:
            case "/exit" | "/bye" | "/quit":
                return False
            case "/help" | "/?":
                self._show(_help(self._out))
            case "/system":
                self._system_command(rest)
            case "/retry":
                self._retry()
            case "/clear":
                self.messages = [message for message in self.messages[:1] if message["role"] == "system"]
                self._say("a new conversation")
            case "/save" | "/load" if not rest:
                self._say(f"give a file: {name} FILE")
            case "/save":
                self._save(Path(rest).expanduser())
            case "/load":
                self._load(Path(rest).expanduser())
            case "/set" if rest.split()[:1] == ["system"]:
                self._system_command(rest.removeprefix("system").strip().strip('"'))
            case "/set":
                self._say(
                    "there is no command /set: sampling is set at the start, for example octavo run MODEL --temperature 0"
                )
            case "/show":
                self._say("there is no command /show: octavo doctor MODEL says what a model is and needs")
            case _:
                self._say(f"there is no command {name[:60]}: /help lists them")
        return True

    def _system_command(self, text: str) -> None:
        if text:
            self._set_system(None if text == "clear" else text)
        system = self._system
        self._say(f"system message: {system}" if system else "there is no system message")

    @property
    def _system(self) -> str:
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else ""

    def _set_system(self, text: str | None) -> None:
        rest = self.messages[1:] if self._system else self.messages
        self.messages = ([{"role": "system", "content": text}] if text else []) + rest

    def _retry(self) -> None:
        questions = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        if not questions:
            return self._say("there is no question yet")
        before = self.messages
        question = before[questions[-1]]["content"]
        self.messages = before[: questions[-1]]
        if not self.ask(question):
            self.messages = before
        return None

    def _save(self, path: Path) -> None:
        try:
            if path.exists() and _read_messages(path) is None:
                return self._say(f"{path} is another file: give a new name")
            fresh = path.with_name(path.name + ".new")
            fresh.write_text(json.dumps({"messages": self.messages}, indent=1, ensure_ascii=False), encoding="utf-8")
            os.replace(fresh, path)
        except (OSError, ValueError) as error:
            return self._say(f"cannot save {path}: {getattr(error, 'strerror', None) or error}")
        return self._say(f"saved {len(self.messages)} messages in {path}")

    def _load(self, path: Path) -> None:
        try:
            messages = _read_messages(path)
        except (OSError, ValueError) as error:
            return self._say(f"cannot load {path}: {getattr(error, 'strerror', None) or error}")
        if messages is None:
            return self._say(f"{path} is not a saved conversation")
        self.messages = messages
        return self._say(f"loaded {len(messages)} messages from {path}")

    def _say(self, text: str) -> None:
        """Print a line about the conversation, apart from answers."""
        self._show(_wrapped(text, self._out))

    def _show(self, text: str) -> None:
        """Print text whose lines are broken already."""
        self._write(f"{DIM}{text}{RESET}\n" if self._is_styled else f"{text}\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _columns(out: IO[str]) -> int:
    """Columns of a terminal."""
    try:
        return os.get_terminal_size(out.fileno()).columns or UNKNOWN_COLUMNS
    except (OSError, ValueError):
        return UNKNOWN_COLUMNS


def _wrapped(text: str, out: IO[str]) -> str:
    """Text with its lines broken between words where `out` is a terminal."""
    if not out.isatty():
        return text
    wrap = TerminalText(lambda: _columns(out))
    return wrap.feed(text) + wrap.finish()


def _help(out: IO[str]) -> str:
    """HELP with explanations that continue below where they began."""
    if not out.isatty():
        return HELP
    columns = _columns(out)
    indent = " " * min(_HELP_INDENT, columns // 3)
    width = max(columns - 1, len(indent) + 1)
    wrap = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrap.fill, HELP.splitlines()))


def _read_messages(path: Path) -> list[Message] | None:
    """None: the file is not a saved conversation. Raises OSError."""
    with open(path, "rb") as file:
        text = file.read(MAX_SAVED_BYTES + 1)
    try:
        saved: Any = json.loads(text) if len(text) <= MAX_SAVED_BYTES else None
    except (ValueError, RecursionError):
        return None
    messages = saved.get("messages") if isinstance(saved, dict) else None
    if not isinstance(messages, list):
        return None
    for message in messages:
        is_one = isinstance(message, dict) and message.keys() == {"role", "content"} and message["role"] in ROLES
        if not is_one or not isinstance(message["content"], str):
            return None
    return messages


def _generator(pieces: Iterator[str]) -> Any:
    """With a close() that ends the request, whatever iterator the model has."""
    return pieces if hasattr(pieces, "close") else (piece for piece in pieces)


# ── input ───────────────────────────────────────────────────────────────────────────────────────────


class Keyboard:
    """Questions typed at a terminal: edited with readline, remembered in a file, of one or several lines."""

    def __init__(self, is_styled: bool, history: Path | None) -> None:
        self._prompt, self._more = "> ", "… "
        if is_styled:  # readline must not count what takes no column
            self._prompt, self._more = (f"\x01\x1b[1;32m\x02{text}\x01{RESET}\x02" for text in ("> ", "… "))
        self._history = history
        with suppress(ImportError):
            import readline

            if history is not None:
                with suppress(OSError):
                    readline.read_history_file(history)
            readline.set_history_length(MAX_HISTORY_LINES)

    def read(self) -> str | None:
        """The next question. None: there are no more. Ctrl-C discards an unfinished one, as in a shell."""
        while True:
            try:
                return self._read_text()
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D quits)", file=sys.stderr)

    def _read_text(self) -> str:
        line = input(self._prompt)
        if line.strip().startswith(QUOTES):
            text = line.strip()[len(QUOTES) :]
            while not text.rstrip().endswith(QUOTES):
                text += "\n" + input(self._more)
            return text.rstrip().removesuffix(QUOTES).strip("\n")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + input(self._more)
        return line

    def close(self) -> None:
        """Keep the history for the next conversation, for this user's eyes only."""
        if self._history is None:
            return
        with suppress(ImportError, OSError):
            import readline

            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(self._history)


def history_file() -> Path | None:
    from octavo.weights.sources.default_model import cache_folder

    try:
        return cache_folder() / "chat_history"
    except ConfigError:  # no home folder
        return None


def shows_colours(out: IO[str]) -> bool:
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") != "dumb"


def converse(model: TalkModel, system: str | None, first: str | None = None) -> int:
    """Answer one question after another until the input ends. `first`: the only question, asked without waiting for input."""
    is_styled = shows_colours(sys.stdout)
    talk = Conversation(model, system, sys.stdout, is_styled)
    if first is not None:
        return 0 if talk.ask(first) else 1
    if not sys.stdin.isatty():
        answered = [talk.ask(question) for line in sys.stdin if (question := line.rstrip("\n")).strip()]
        return 0 if all(answered) else 1  # a script does not see a failure that a person has seen
    print(_wrapped(GREETING, sys.stderr), file=sys.stderr)
    keyboard = Keyboard(is_styled, history_file())
    try:
        while (question := keyboard.read()) is not None:
            if question.lstrip().startswith("/") and "\n" not in question:
                if not talk.run_command(question):
                    break
            elif question.strip():
                talk.ask(question)
    finally:
        keyboard.close()
    return 0
