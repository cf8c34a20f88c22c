"""A server whose API process ends, as by a fault in native code, when a text to tokenize holds the word DEADLY: all else is the real
thing. `python -m tests.e2e.mortal_api serve …` serves; without arguments this is the API process."""

import os
import signal
import sys

from octavo.cli import main
from octavo.server import process
from octavo.supervisor import api_processes
from octavo.text import Text

DEADLY = "Mississippi"


def plant() -> None:
    encode = Text.encode

    def mortal_encode(self: Text, text: str, *args: object, **kwargs: object) -> list[int]:
        if DEADLY in text:
            os.kill(os.getpid(), signal.SIGSEGV)
        return encode(self, text, *args, **kwargs)  # type: ignore[arg-type]

    Text.encode = mortal_encode  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    if sys.argv[1:]:
        api_processes.API_MODULE = "tests.e2e.mortal_api"
        sys.exit(main.main(sys.argv[1:]))
    plant()
    os._exit(process.main())
