"""Engines that are killed, that hang, or that a request ends, under real streams: clients see a pause, and every answer whole."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.mortal_engine import DEADLY, SLOW
from tests.e2e.servers import Server
from tests.processes import is_alive

pytestmark = pytest.mark.model

NUM_STREAMS = 40  # eight of each kind of story


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Two API processes; an engine that does not turn for two seconds is killed. What it does is recorded with its tokens."""
    arguments = ("--kv-cache-memory-bytes", "512M", "--api-processes", "2", "--step-timeout", "20", "--record-tokens")
    arguments += ("--slow-step-seconds", "1", "--record-folder", str(tmp_path_factory.mktemp("recordings")))
    os.environ["OCTAVO_TEST_ENOUGH"] = str(tmp_path_factory.mktemp("mortal") / "enough")
    os.environ["CALM_TEST_FILE"] = str(tmp_path_factory.mktemp("mortal") / "calm")
    with Server(*arguments, module="tests.e2e.mortal_engine") as server:
        yield server
        assert server.terminate() == 0, server.lines


async def story(
    client: openai.AsyncOpenAI, number: int, begun: list[int], max_tokens: int = 40
) -> tuple[dict[int, str], object, list[float]]:
    """(texts by choice, usage, logprobs): greedy, seeded, penalised, several choices with stop strings, kept to a grammar."""
    kinds = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": number, "presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"temperature": 0.8, "seed": number, "n": 2, "stop": ["!", "?"]},
        {"temperature": 0, "logprobs": 2, "extra_body": {"min_tokens": max_tokens * 3 // 4}},
        {"temperature": 0.8, "seed": number, "extra_body": {"structured_outputs": {"regex": "( [a-z]{2,8}){40,60}"}}},
    ]
    stream = await client.completions.create(
        model="",
        prompt=f"Story number {number}: Once upon a time",
        max_tokens=max_tokens + number % 5,
        stream=True,
        stream_options={"include_usage": True},
        **kinds[number % len(kinds)],
    )
    texts: dict[int, str] = {}
    usage, logprobs = None, []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs:
                logprobs += choice.logprobs.token_logprobs
        begun[number] += 1
        if chunk.usage:
            usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
    return texts, usage, logprobs


async def stories(
    server: Server,
    fault=None,
    at: int = 0,
    num_streams: int = NUM_STREAMS,
    keeps_errors: bool = False,
    max_tokens: int = 40,
) -> list[tuple]:
    """The first of them; `fault` comes when every stream has begun and all together have had `at` events, and before the last has ended."""
    begun = [0] * num_streams
    async with openai.AsyncOpenAI(base_url=server.base + "/v1", api_key="x", max_retries=0, timeout=120) as client:
        tasks = [asyncio.create_task(story(client, number, begun, max_tokens)) for number in range(num_streams)]
        if fault is not None:
            while not (all(begun) and sum(begun) >= at):
                assert not any(task.done() and task.exception() for task in tasks)
                await asyncio.sleep(0.01)
            assert sum(task.done() for task in tasks) < num_streams
            fault()
        return await asyncio.gather(*tasks, return_exceptions=keeps_errors)


def watch_health(server: Server) -> list[tuple[int, str]]:
    """What /health says, until it has said that something is wrong, and then that all is well."""
    seen = []
    while not any(status == 503 for status, _ in seen) or seen[-1][0] != 200:
        assert server.get("/health/live")[0] == 200
        seen.append(server.get("/health"))
        time.sleep(0.1)
    return seen


def in_calm_steps(fault: Callable[[], object]) -> Callable[[], None]:
    """The engine pauses before each step until `fault` has come: so it comes early in all streams, as slow as their client may be."""
    calm = Path(os.environ["CALM_TEST_FILE"])
    calm.touch()

    def act() -> None:
        fault()
        calm.unlink()

    return act


def journeys(server: Server) -> list[dict]:
    return json.loads(server.get("/v1/requests?state=finished&limit=1000")[1])["data"]


def check_interrupted(journeys: list[dict]) -> None:
    """They say that an engine ended, what came of it, and how long there was none; and their times sum to the whole."""
    interrupted = [journey for journey in journeys if any(stage["name"] == "restart" for stage in journey["stages"])]
    assert len(interrupted) == NUM_STREAMS, "none was done by then"
    for journey in interrupted:
        stages = journey["stages"]
        assert sum(stage["end"] - stage["start"] for stage in stages) == pytest.approx(journey["seconds"], abs=1e-3)
        assert all(stage["end"] >= stage["start"] for stage in stages)
        (lost,) = [at for at, stage in enumerate(stages) if stage["name"] == "restart"]
        assert stages[lost - 1]["name"] == "engine" and stages[lost]["end"] - stages[lost]["start"] > 0.1
        assert "an engine ended during this request" in journey["note"]
        if not journey["legs"]:
            assert sum(stage.get("output_tokens", 0) for stage in stages) == journey["output_tokens"]


@pytest.fixture(scope="module")
def untroubled(server):
    return asyncio.run(stories(server))


def test_streams_of_a_killed_engine_go_on(server, untroubled):
    old = server.engine()
    before = {journey["id"] for journey in journeys(server)}
    kill = in_calm_steps(lambda: os.kill(old, signal.SIGKILL))
    assert asyncio.run(stories(server, kill, NUM_STREAMS * 4)) == untroubled
    assert server.engine() != old
    after = {journey["id"]: journey for journey in journeys(server)}
    assert len(before) == NUM_STREAMS and before <= set(after), "what the dead engine kept is sent again"
    check_interrupted([journey for id, journey in after.items() if id not in before])
    assert server.wait_until_idle() == (0, 0, 0)
    assert server.get("/health")[0] == 200
    # What led to it was left in a file: the same plans to the last, and, by the model, the same tokens.
    (line,) = (line for line in server.lines if "the engine's recording is kept" in line)
    command = line.partition(": octavo ")[2].split()
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", *command, "--model", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["plans"]["same"] == found["plans"]["steps"] > 20 and not found["notes"], found["plans"]
    assert found["tokens"]["same"] == found["tokens"]["compared"] > NUM_STREAMS * 4, found["tokens"]


def test_streams_of_a_stopped_engine_go_on(server, untroubled):
    old = server.engine()
    seen: list[tuple[int, str]] = []

    def stop() -> None:
        os.kill(old, signal.SIGSTOP)
        threading.Thread(target=lambda: seen.extend(watch_health(server))).start()

    assert asyncio.run(stories(server, in_calm_steps(stop), NUM_STREAMS * 4)) == untroubled
    assert not is_alive(old)
    statuses = {status for status, _ in seen}
    assert statuses == {200, 503} and seen[-1][0] == 200, seen
    assert server.get("/health/ready")[0] == server.get("/health/progress")[0] == 200
    assert json.loads(server.get("/health/progress")[1])["restarts"] >= 1
    (line,) = (line for line in server.lines if "hangs and is killed" in line)
    assert "nothing is computed; requests in it: cmpl-" in line
    assert server.wait_until_idle() == (0, 0, 0)


def test_an_api_process_that_is_killed_takes_its_clients_along_and_is_replaced(server, untroubled):
    def processes() -> list[int]:
        return [pid for pid, command in server.children().items() if command.rstrip().endswith("server.process")]

    doomed, other = processes()
    kill = in_calm_steps(lambda: os.kill(doomed, signal.SIGKILL))
    outcomes = asyncio.run(stories(server, kill, 40, 8, keeps_errors=True))
    whole = [ours for ours, theirs in zip(outcomes, untroubled, strict=False) if ours == theirs]
    closed = [error for error in outcomes if isinstance(error, openai.APIError | httpx.HTTPError)]
    assert len(whole) == len(closed) == 4, outcomes
    assert server.wait_until_idle() == (0, 0, 0)
    while not any("is back after" in line and "API process" in line for line in server.lines):
        time.sleep(0.05)
    assert len(processes()) == 2 and other in processes() and doomed not in processes()
    assert asyncio.run(stories(server, num_streams=8)) == untroubled[:8]
    assert server.metric("octavo:restarts_total", 'process="api",cause="killed"') == 1
    assert json.loads(server.get("/health/progress")[1])["api_restarts"] == 1


@pytest.mark.parametrize("cause", ["prompt", "grammar"])
def test_what_ends_engines_fails_alone(server, untroubled, cause):
    refused: list[tuple[int, str]] = []

    async def both() -> list[tuple]:
        body = {"prompt": "The river is called", "max_tokens": 20, "temperature": 0}
        if cause == "prompt":
            body["prompt"] += f"{DEADLY} and"
        else:
            body["structured_outputs"] = {"regex": f"( [a-z]+){{3}}{DEADLY}"}
        poison = asyncio.to_thread(lambda: refused.append(server.post("/v1/completions", body)))
        (answers, _) = await asyncio.gather(stories(server, num_streams=6), poison)
        return answers

    assert asyncio.run(both()) == untroubled[:6]
    ((status, text),) = refused
    error = json.loads(text)["error"]
    assert status == 500 and error["code"] == "request_failed" and "request cmpl-" in error["message"]
    assert server.wait_until_idle() == (0, 0, 0)


def test_a_step_that_takes_far_longer_than_usual_is_reported_and_goes_on(server):
    def ask(river: str) -> tuple[int, str]:
        prompt = f"In a land far away{river} was the name of a river that had more bends than anybody could count"
        return server.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0})

    for river in (" Danube", " Thames"):  # what a step of that size takes
        assert ask(river)[0] == 200
    engine, answers = server.engine(), []
    asking = threading.Thread(target=lambda: answers.append(ask(SLOW)))
    asking.start()
    seen: dict[str, tuple[int, str]] = {}
    while not answers and set(seen) != {"/health", "/health/ready", "/health/progress"}:
        for path in ("/health", "/health/ready", "/health/progress"):
            status, text = server.get(path)
            if status == 503:
                seen[path] = (status, text)
        time.sleep(0.05)
    assert set(seen) == {"/health", "/health/ready", "/health/progress"}, seen
    assert all("has been running for" in text and "usually" in text for _, text in seen.values())
    Path(os.environ["OCTAVO_TEST_ENOUGH"]).touch()
    asking.join()
    assert answers[0][0] == 200 and server.engine() == engine and server.get("/health")[0] == 200
