"""`octavo help [TOPIC]`: the help of a command, a topic's text, or the whole as a manual page."""

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Iterator, Sequence

from octavo import __version__
from octavo.cli.command_tree import Command, Option, command_tree
from octavo.cli.topics import EXIT_CODES, TOPICS
from octavo.errors import ConfigError


def help_text(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """The help for a command or a topic; without words, the list of both. Raises ConfigError."""
    if not words:
        topics = "\n".join(f"  {name:<20}  {text}" for name, (text, _) in TOPICS.items())
        return f"{parser.format_help()}\ntopics:\n{topics}\n\n`octavo help NAME` shows a command or a topic.\n"
    if len(words) == 1 and words[0] in TOPICS:
        return "\n".join(wrapped(TOPICS[words[0]][1](), shutil.get_terminal_size().columns)) + "\n"
    return _parser_of(parser, words).format_help()


def _parser_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    for place, word in enumerate(words):
        inner = {
            name: each
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
            for name, each in action.choices.items()
        }
        if word not in inner:
            known = [*inner, *(TOPICS if place == 0 else ())]
            close = difflib.get_close_matches(word, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f": there are {', '.join(known)}" if known else ""
            raise ConfigError(f"no help for {' '.join(words[: place + 1])!r}{hint}")
        parser = inner[word]
    return parser


def wrapped(lines: Iterator[str], columns: int) -> Iterator[str]:
    """Lines without backticks, folded at their own indent."""
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        text = line.replace("`", "").strip()
        more = indent + ("    " if indent == "  " else "")
        yield from textwrap.wrap(
            text, max(40, columns), initial_indent=indent, subsequent_indent=more, break_on_hyphens=False
        ) or [""]


# ── the manual page ─────────────────────────────────────────────────────────────────────────────────


def manual_page(parser: argparse.ArgumentParser) -> str:
    """octavo(1) as roff, for `man`."""
    return "\n".join(_page(command_tree(parser))) + "\n"


def _page(tree: Command) -> Iterator[str]:
    yield f'.TH OCTAVO 1 "" "octavo {__version__}" "User commands"'
    yield ".SH NAME"
    yield r"octavo \- an LLM inference server"
    yield ".SH SYNOPSIS"
    for command in tree.walk():
        if not command.commands:
            yield ".br"
            yield rf"\fB{_roff(' '.join(('octavo', *command.path)))}\fR {_roff(_usage(command))}"
    yield ".SH DESCRIPTION"
    yield _roff(tree.description)
    for command in tree.walk():
        if command.path and not command.commands:
            yield from _command(command)
    for title, (_, lines) in TOPICS.items():
        if title != "exit-codes":
            yield f".SH {title.upper()}"
            yield from _paragraphs(lines())
    yield ".SH EXIT STATUS"
    for code, serve, others in EXIT_CODES:
        yield ".TP"
        yield code
        yield _roff("; ".join(filter(None, (serve and f"serve: {serve}", f"other commands: {others}"))))


def _usage(command: Command) -> str:
    words = [f"[{each.metavar}]" if each.metavar == "MODEL" else each.metavar for each in command.positionals]
    return " ".join([*words, "[flags]"])


def _command(command: Command) -> Iterator[str]:
    yield f'.SH "OCTAVO {_roff(" ".join(command.path).upper())}"'
    yield _roff(command.description or command.help)
    for option in command.positionals:
        yield from _entry(option)
    for title, options in command.groups:
        yield f'.SS "{_roff(title)}"'
        for option in options:
            yield from _entry(option)


def _entry(option: Option) -> Iterator[str]:
    yield ".TP"
    names = ", ".join(rf"\fB{_roff(name)}\fR" for name in option.names)
    value = "|".join(option.choices) or option.metavar
    yield " ".join(filter(None, (names, rf"\fI{_roff(value)}\fR" if value else "")))
    yield _roff(option.help)


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("    "):
            yield ".br"
            yield _roff(line.strip())
        elif line:
            yield ".PP"
            yield _roff(line.strip())


def _roff(text: str) -> str:
    """Plain text as one roff line: no request at its start, no escapes, and dashes that can be copied."""
    text = text.replace("`", "").replace("\\", r"\e").replace("-", r"\-")
    text = "".join(letter if letter.isascii() else rf"\[u{ord(letter):04X}]" for letter in text)
    return rf"\&{text}" if text.startswith((".", "'")) else text
