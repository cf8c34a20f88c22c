"""List the flags of `vllm serve` from vLLM's own sources, without importing them.

    pip download --no-deps vllm==VERSION
    python -m scripts.vllm_flags vllm-VERSION-….whl > tests/data/vllm_flags.txt

Prints a line for each flag: its name, and `switch` if it takes no value, else `value`. tests/cli/test_cli_foreign_flags.py holds
octavo/foreign_flags.py against this list."""

import ast
import re
import sys
import zipfile
from collections.abc import Iterator

ENGINE_FLAGS = "vllm/engine/arg_utils.py"
SERVER_FLAGS = "vllm/entrypoints/common/cli_args.py"
ENGINE_CLASSES = ("EngineArgs", "AsyncEngineArgs")
SERVER_CLASSES = ("BaseFrontendArgs", "FrontendArgs")  # every field of these is a flag


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m scripts.vllm_flags WHEEL", file=sys.stderr)
        return 2
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        version = re.search(r"vllm-([^-]+)-", sys.argv[1])
        print(f"# The flags of `vllm serve` {version[1] if version else ''}, by `python -m scripts.vllm_flags`")
        for name, kind in sorted(
            flags_in(wheel.read(ENGINE_FLAGS).decode(), wheel.read(SERVER_FLAGS).decode()).items()
        ):
            print(name, kind)
    return 0


def flags_in(engine: str, server: str) -> dict[str, str]:
    """Flag → `switch` or `value`, from the texts of both files."""
    engine_tree, server_tree = ast.parse(engine), ast.parse(server)
    fields = dict(_fields(engine_tree, ENGINE_CLASSES))
    found = {"--" + name.replace("_", "-"): kind for name, kind in _fields(server_tree, SERVER_CLASSES)}
    for tree in (engine_tree, server_tree):
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                names = [str(word.value) for word in call.args if isinstance(word, ast.Constant)]
                long = next((name for name in names if name.startswith("--")), "")
                is_switch = any(
                    word.arg == "action"
                    and ast.unparse(word.value) in ("'store_true'", "argparse.BooleanOptionalAction")
                    for word in call.keywords
                )
                kind = "switch" if is_switch else fields.get(long[2:].replace("-", "_"), "value")
                found |= dict.fromkeys((name for name in names if name.startswith("-")), kind)
    return found


def _fields(tree: ast.Module, classes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in classes:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    kinds = set(ast.unparse(field.annotation).split(" | ")) - {"None"}
                    yield field.target.id, "switch" if kinds == {"bool"} else "value"


if __name__ == "__main__":
    sys.exit(main())
