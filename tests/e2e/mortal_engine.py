"""A server whose engine ends, as by a fault of its own, when a prompt or a grammar holds the word DEADLY, and takes SLOW_SECONDS for a step with the
word SLOW, or until there is the file that OCTAVO_TEST_ENOUGH names; while there is the file that CALM_TEST_FILE names, it pauses before each
step, so that a client on a busy machine keeps up. All else is the real thing.
`python -m tests.e2e.mortal_engine serve …` serves; without arguments this is the engine process."""

import os
import sys
import time
from collections.abc import Callable

from octavo.cli import main
from octavo.config import Config
from octavo.engine import build, process
from octavo.executor.base import Executor
from octavo.messages import StepPlan
from octavo.supervisor import supervisor
from octavo.text import load_text
from octavo.weights.sources.source import ModelSource

DEADLY = " Mississippi"
SLOW = " Sacramento"
SLOW_SECONDS = 15.0
CALM_SECONDS = 0.2


def pause_if_calm() -> None:
    if os.path.exists(os.environ.get("CALM_TEST_FILE", "")):
        time.sleep(CALM_SECONDS)


def load_executor(config: Config, source: ModelSource) -> Executor:
    from octavo.executor.local import LocalExecutor  # brings torch, which the supervisor can do without

    class MortalExecutor(LocalExecutor):
        def submit(self, plan: StepPlan) -> None:
            for entering in plan.enters:
                if holds(entering.token_ids, deadly):
                    os.abort()
                until = time.monotonic() + SLOW_SECONDS * holds(entering.token_ids, slow)
                while time.monotonic() < until and not os.path.exists(enough):  # as a kernel that goes round in circles
                    pass
            pause_if_calm()
            super().submit(plan)

        def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
            if DEADLY.strip() in grammar:
                os.abort()
            super().prepare(grammar, forgets, done)

    def holds(ids: list[int], word: list[int]) -> bool:
        return any(ids[at : at + len(word)] == word for at in range(len(ids)))

    text, enough = load_text(source.path), os.environ.get("OCTAVO_TEST_ENOUGH", "")
    deadly, slow = text.encode(DEADLY), text.encode(SLOW)
    return MortalExecutor(config, source)


if __name__ == "__main__":
    if sys.argv[1:]:
        supervisor.ENGINE_MODULE = "tests.e2e.mortal_engine"
        sys.exit(main.main(sys.argv[1:]))
    build.load_executor = load_executor
    os._exit(process.main())
