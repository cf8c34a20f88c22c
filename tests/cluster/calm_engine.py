"""The engine process on a node. While there is the file that CALM_TEST_FILE names, it pauses before each step, so that a client on a busy
machine keeps up."""

import runpy
from typing import Any

from octavo.engine import build
from octavo.executor.base import Executor
from octavo.messages import StepPlan
from tests.e2e.mortal_engine import pause_if_calm

_load = build.load_executor


def load_executor(*arguments: Any) -> Executor:
    executor = _load(*arguments)
    submit = executor.submit

    def submit_calmly(plan: StepPlan) -> None:
        pause_if_calm()
        submit(plan)

    executor.submit = submit_calmly  # type: ignore[method-assign]
    return executor


if __name__ == "__main__":
    build.load_executor = load_executor
    runpy.run_module("octavo.cluster.engine", run_name="__main__")
