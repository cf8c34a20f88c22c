"""`octavo scale`: changes the number of a running server's replicas, and waits until it has them."""

import json
import time
from typing import Any

from octavo.cli.chat import Remote
from octavo.errors import EngineUnavailable
from octavo.ipc.stderr import say

LOOK_SECONDS = 0.25
ANSWER_SECONDS = 30.0


def run(url: str, api_key: str, replicas: int | None, restart: bool, timeout: float) -> int:
    server = Remote(url, api_key, timeout=ANSWER_SECONDS)
    replicas_before = server.read("/fleet")["replicas"]
    before = {each["replica"]: each["epoch"] for each in replicas_before if each["status"] != "failed"}
    wish = {} if replicas is None else {"replicas": replicas}
    if restart:
        wish["restart"] = True
    server.send("/fleet", json.dumps(wish).encode())
    until, said = time.monotonic() + timeout, ""
    while time.monotonic() < until:
        try:
            fleet = server.read("/fleet")
        except EngineUnavailable:  # between two replicas, there may be none
            fleet = None
        if fleet is not None:
            line = summary(fleet)
            if line != said:
                say(line)
                said = line
            if replicas is not None and fleet["target"] < replicas and fleet["note"]:
                say(f"{replicas} replicas were asked for: {fleet['note']}")
                return 1
            if restart and any(each["status"] == "failed" and each["replica"] in before for each in fleet["replicas"]):
                say(f"not all replicas were started again: {fleet['note']}")
                return 1
            if is_done(fleet, replicas, before if restart else {}):
                return 0
        time.sleep(LOOK_SECONDS)
    say(f"not done after {timeout:g} s; the server goes on with it")
    return 1


def is_done(fleet: dict[str, Any], replicas: int | None, before: dict[int, int]) -> bool:
    """Whether as many replicas are ready as wanted, and none is left of those in `before` (replica → epoch)."""
    live = [each for each in fleet["replicas"] if each["status"] != "failed"]
    if any(each["status"] != "ready" or before.get(each["replica"]) == each["epoch"] for each in live):
        return False
    return len(live) == (fleet["target"] if replicas is None else replicas)


def summary(fleet: dict[str, Any]) -> str:
    """One line: 2 of 3 replicas are ready; replica 2 starting."""
    ready = [each for each in fleet["replicas"] if each["status"] == "ready"]
    others = [f"replica {each['replica']} {each['status']}" for each in fleet["replicas"] if each not in ready]
    return "; ".join([f"{len(ready)} of {fleet['target']} replicas are ready", *others])
