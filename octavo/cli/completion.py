"""`octavo completion SHELL`: completion scripts for bash, zsh and fish, made from the parser's commands, flags and choices."""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence

from octavo.cli.command_tree import Command, Option


def script(shell: str, tree: Command) -> str:
    return "\n".join(SHELLS[shell](tree)) + "\n"


# ── bash ────────────────────────────────────────────────────────────────────────────────────────────


def _bash(tree: Command) -> Iterator[str]:
    yield "# Completion of octavo for bash. Made by: octavo completion bash"
    yield "_octavo() {"
    yield "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command= index"
    yield "    COMPREPLY=()"
    yield "    # --flag=value arrives as three words: --flag, =, value."
    yield "    if [[ $current == '=' ]]; then current=; fi"
    yield "    if [[ $previous == '=' ]]; then previous=${COMP_WORDS[COMP_CWORD-2]}; fi"
    yield "    for ((index = 1; index < COMP_CWORD; index++)); do"
    yield '        case "$command ${COMP_WORDS[index]}" in'
    yield f"            {_alternatives(' '.join(('', *each.path)) for each in tree.walk() if each.path)})"
    yield '                command="$command ${COMP_WORDS[index]}" ;;'
    yield "        esac"
    yield "    done"
    yield '    case "$command:$previous" in'
    for command in tree.walk():
        name = " ".join(("", *command.path))
        for value, options in _by_value(command.options).items():
            yield f"        {_alternatives(f'{name}:{flag}' for option in options for flag in option.names)})"
            yield f"            {_bash_value(value)}; return ;;"
    yield "    esac"
    yield "    local words="
    yield '    case "$command" in'
    for command in tree.walk():
        names = [name for option in command.options for name in option.names]
        inner = [each.path[-1] for each in command.commands]
        yield f"        {shlex.quote(' '.join(('', *command.path)))})"
        yield "            if [[ $current == -* ]]; then"
        yield f"                words={shlex.quote(' '.join(names))}"
        yield "            else"
        yield f"                {_bash_positional(command, inner)}"
        yield "            fi ;;"
    yield "    esac"
    yield '    if [[ -n $words ]]; then COMPREPLY=($(compgen -W "$words" -- "$current")); fi'
    yield "}"
    yield "complete -F _octavo octavo"


def _alternatives(words: Iterator[str]) -> str:
    return "|".join(shlex.quote(word) for word in words)


def _bash_positional(command: Command, inner: list[str]) -> str:
    choices = inner or [choice for option in command.positionals for choice in option.choices]
    if choices:
        return f"words={shlex.quote(' '.join(choices))}"
    return "compopt -o default 2>/dev/null" if any(each.takes_file for each in command.positionals) else ":"


def _bash_value(value: tuple[str, ...] | str) -> str:
    if isinstance(value, tuple):
        return f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(value))} -- "$current"))'
    return 'compopt -o default 2>/dev/null; COMPREPLY=($(compgen -f -- "$current"))' if value == "file" else ":"


def _by_value(options: Sequence[Option]) -> dict[tuple[str, ...] | str, list[Option]]:
    """Flags that take a value, by what is offered for it: choices, "file" names, or "" nothing."""
    found: dict[tuple[str, ...] | str, list[Option]] = {}
    for option in options:
        if option.metavar:
            found.setdefault(option.choices or ("file" if option.takes_file else ""), []).append(option)
    return found


# ── zsh ─────────────────────────────────────────────────────────────────────────────────────────────


def _zsh(tree: Command) -> Iterator[str]:
    yield "#compdef octavo"
    yield "# Completion of octavo for zsh. Made by: octavo completion zsh"
    for command in tree.walk():
        yield ""
        yield f"{_zsh_name(command)}() {{"
        yield "    local -a commands"
        yield "    local context state state_descr line"
        yield "    typeset -A opt_args"
        specs = [spec for option in command.options for spec in _zsh_specs(option)]
        if command.commands:
            specs += ["1: :->command", "*:: :->arguments"]
        else:
            specs += [f"::{_zsh_text(each.metavar)}:{_zsh_action(each)}" for each in command.positionals]
        yield "    _arguments -C " + " \\\n        ".join(map(shlex.quote, specs))
        if command.commands:
            yield "    case $state in"
            yield "        command)"
            yield "            commands=("
            yield from (
                f"                {shlex.quote(each.path[-1] + ':' + _zsh_text(each.help))}"
                for each in command.commands
            )
            yield "            )"
            yield "            _describe command commands ;;"
            yield "        arguments)"
            yield "            case $words[1] in"
            yield from (
                f"                {shlex.quote(each.path[-1])}) {_zsh_name(each)} ;;" for each in command.commands
            )
            yield "            esac ;;"
            yield "    esac"
        yield "}"
    yield ""
    # As a file of $fpath it runs when it is first needed; sourced, it registers itself.
    yield 'if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _octavo "$@"; else compdef _octavo octavo; fi'


def _zsh_name(command: Command) -> str:
    return "_" + "_".join(("octavo", *command.path)).replace("-", "_")


def _zsh_specs(option: Option) -> Iterator[str]:
    text = _zsh_text(option.summary)
    value = f":{_zsh_text(option.metavar if not option.choices else 'value')}:{_zsh_action(option)}"
    for name in option.names:
        equals = "=" if option.metavar and name.startswith("--") else ""
        yield f"{name}{equals}[{text}]" + (value if option.metavar else "")


def _zsh_action(option: Option) -> str:
    if option.choices:
        return f"({' '.join(option.choices)})"
    return "_files" if option.takes_file else " "


def _zsh_text(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


# ── fish ────────────────────────────────────────────────────────────────────────────────────────────


def _fish(tree: Command) -> Iterator[str]:
    yield "# Completion of octavo for fish. Made by: octavo completion fish"
    yield "complete -c octavo -f"
    for command in tree.walk():
        inner = [each.path[-1] for each in command.commands]
        seen = [f"__fish_seen_subcommand_from {word}" for word in command.path]
        if inner:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(inner)}")
        start = f"complete -c octavo -n {_fish_quoted('; and '.join(seen))}"
        for each in command.commands:
            yield f"{start} -a {each.path[-1]} -d {_fish_quoted(each.help)}"
        for option in command.positionals:
            if option.choices:
                yield f"{start} -a {_fish_quoted(' '.join(option.choices))}"
            elif option.takes_file:
                yield f"{start} -F"
        for option in command.options:
            for name in option.names:
                yield f"{start} {_fish_flag(name)}{_fish_value(option)} -d {_fish_quoted(option.summary)}"


def _fish_flag(name: str) -> str:
    if name.startswith("--"):
        return f"-l {name[2:]}"
    return f"-s {name[1:]}" if len(name) == 2 else f"-o {name[1:]}"


def _fish_value(option: Option) -> str:
    if not option.metavar:
        return ""
    if option.choices:
        return f" -x -a {_fish_quoted(' '.join(option.choices))}"
    return " -r -F" if option.takes_file else " -x"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[Command], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
