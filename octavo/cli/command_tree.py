"""The command line as data, read from the parser: what shell completion, the manual page and the help are made from."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field

_FILES = ("FILE", "FOLDER", "MODEL", "INPUT", "OUTPUT", "CERTFILE", "KEYFILE", "CERTS", "TEMPLATE", "TOKENIZER")
"""Metavars of values for which a shell offers file names."""


@dataclass(frozen=True, slots=True)
class Option:
    names: tuple[str, ...]
    metavar: str  # "": takes no value
    choices: tuple[str, ...]
    help: str

    @property
    def takes_file(self) -> bool:
        return self.metavar in _FILES

    @property
    def summary(self) -> str:
        """The first clause of the help, for a list of completions."""
        return self.help.split(". ")[0].split("; ")[0].split(" (default")[0]


@dataclass(frozen=True, slots=True)
class Command:
    path: tuple[str, ...]  # () for octavo itself
    help: str  # one line
    description: str
    positionals: tuple[Option, ...]  # names: empty
    groups: tuple[tuple[str, tuple[Option, ...]], ...]  # flags by the title of their group
    commands: "tuple[Command, ...]" = field(default=())

    @property
    def options(self) -> tuple[Option, ...]:
        return tuple(option for _, options in self.groups for option in options)

    def walk(self) -> "Iterator[Command]":
        yield self
        for inner in self.commands:
            yield from inner.walk()


def command_tree(parser: argparse.ArgumentParser, path: tuple[str, ...] = (), text: str = "") -> Command:
    inner: list[Command] = []
    positionals: list[Option] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            inner += [command_tree(each, (*path, name), helps.get(name, "")) for name, each in action.choices.items()]
        elif not action.option_strings:
            positionals.append(_option(action))
    groups = [
        (str(group.title), tuple(_option(action) for action in group._group_actions if action.option_strings))
        for group in parser._action_groups
    ]
    return Command(
        path=path,
        help=text,
        description=parser.description or "",
        positionals=tuple(positionals),
        groups=tuple((title, options) for title, options in groups if options),
        commands=tuple(inner),
    )


def _option(action: argparse.Action) -> Option:
    takes_value = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
    metavar = str(action.metavar or action.dest.upper()) if takes_value else ""
    choices = tuple(map(str, action.choices or ()))
    if metavar.startswith("{"):
        choices = tuple(metavar.strip("{}").split(","))
    text = " ".join((action.help or "").replace("%%", "%").split())
    return Option(tuple(action.option_strings), metavar, choices, text)
