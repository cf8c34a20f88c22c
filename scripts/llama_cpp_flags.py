"""List the flags of `llama-server` from llama.cpp's own sources, without compiling them.

    python -m scripts.llama_cpp_flags llama.cpp/common/arg.cpp > tests/data/llama_cpp_flags.txt

Prints a line for each flag: its name, and `switch` if it takes no value, else `value`. tests/cli/test_cli_foreign_flags.py holds
octavo/foreign_flags.py against this list."""

import re
import sys
from pathlib import Path

_OPTION = re.compile(r"add_opt\(common_arg\(\s*(.*?)\n\s+\)((?:\.[^;]*)?)\);", re.S)
_HANDLER = re.compile(r"\[[^\]]*\]\(common_params &\s*(?:/\*\w*\*/|\w*)(?:,\s*([^)]*))?\)")
_EXAMPLES = re.compile(r"set_examples\(\{([^}]*)\}\)")
_OF_THE_SERVER = ("LLAMA_EXAMPLE_COMMON", "LLAMA_EXAMPLE_SERVER")


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m scripts.llama_cpp_flags ARG.CPP", file=sys.stderr)
        return 2
    print("# The flags of `llama-server`, by `python -m scripts.llama_cpp_flags`")
    for name, kind in sorted(flags_in(Path(sys.argv[1]).read_text(encoding="utf-8")).items()):
        print(name, kind)
    return 0


def flags_in(source: str) -> dict[str, str]:
    """Flag → `switch` or `value`, from the text of arg.cpp."""
    found: dict[str, str] = {}
    for option, after in _OPTION.findall(source):
        examples = _EXAMPLES.search(after)
        if examples is not None and not any(name in examples[1] for name in _OF_THE_SERVER):
            continue
        handler = _HANDLER.search(option)
        value = handler[1] if handler is not None else None
        kind = "switch" if value is None or value.startswith("bool") else "value"
        names = re.match(r"\{[^}]*\}(?:,\s*\{[^}]*\})?", option)  # the second list: what turns it off
        if names is not None:
            found |= dict.fromkeys(re.findall(r'"(-[^"]+)"', names[0]), kind)
    return found


if __name__ == "__main__":
    sys.exit(main())
