"""The process in which test_documents.py runs Python blocks. Reads pages from stdin, each a list of (place, text), and prints what each block
printed and raised as its last line."""

import contextlib
import io
import json
import sys
import traceback


def main() -> None:
    results = []
    for blocks in json.load(sys.stdin):
        names: dict[str, object] = {"__name__": "__main__"}
        for place, text in blocks:
            printed, error = io.StringIO(), ""
            with contextlib.redirect_stdout(printed):
                try:
                    exec(compile(text, place, "exec"), names)
                except BaseException:
                    error = traceback.format_exc()
            results.append({"place": place, "printed": printed.getvalue(), "error": error})
        for value in names.values():
            if hasattr(value, "close") and type(value).__module__.startswith("octavo"):
                value.close()  # the engine of an LLM, which a script ends with itself
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
