"""Sends one large or malformed request after another to a real server, and measures what each costs everybody else: the longest
answer time of GET /health while it runs, the memory that the API process gains, and how the request is answered.

    python -m benchmarks.budgets [NAME …]      # only attacks whose name contains one of these

Exit code 1 if an attack is answered with a 5xx, blocks /health for more than 300 ms, or takes more than 256 MB of memory beyond
twice the bytes that were sent. The requests go to 127.0.0.1 only, one at a time."""

import argparse
import contextlib
import dataclasses
import http.client
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.torture.house import House

HEALTH_LIMIT_S = 0.3
MEMORY_LIMIT = 256 * 2**20
ANSWER_LIMIT_S = 300
IDLE_S = 2.2  # after which an idle API process has given its memory back
PAUSE_S = 0.02  # between two questions for /health

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, EMBEDDINGS, TOKENIZE = "/v1/responses", "/v1/embeddings", "/tokenize"
HI = [{"role": "user", "content": "hi"}]


@dataclasses.dataclass(frozen=True, slots=True)
class Attack:
    name: str
    path: str
    body: Callable[[], bytes]
    times: int = 1  # sent at the same time


def attack(name: str, path: str, **fields: Any) -> Attack:
    return Attack(name, path, lambda: json.dumps(fields).encode())


def raw(name: str, path: str, body: Callable[[], bytes]) -> Attack:
    return Attack(name, path, body)


def member(field: str, value: Callable[[], bytes], more: bytes = b'"prompt":"a","max_tokens":1') -> Callable[[], bytes]:
    return lambda: b'{"' + field.encode() + b'":' + value() + b"," + more + b"}"


def repeated(item: bytes, count: int) -> Callable[[], bytes]:
    return lambda: b"[" + b",".join([item] * count) + b"]"


def keys(count: int, value: str = "1") -> Callable[[], bytes]:
    return lambda: ("{" + ",".join(f'"{number}":{value}' for number in range(count)) + "}").encode()


HI_JSON = b'"messages":[{"role":"user","content":"hi"}],"max_tokens":1'
MANY = 2_000_000


def tools(count: int) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    return [
        {"type": "function", "function": {"name": f"f{at}", "description": "d", "parameters": schema}}
        for at in range(count)
    ]


def attacks() -> list[Attack]:
    found = []
    # Lists and objects with many wrong or right members.
    for field in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids", "guided_choice", "metadata", "unknown"):
        found.append(raw(f"{field}: 2M of {{}}", COMPLETIONS, member(field, repeated(b"{}", MANY))))
    found += [
        raw("stop_token_ids: 2M of 1.5", COMPLETIONS, member("stop_token_ids", repeated(b"1.5", MANY))),
        raw("bad_words: 2M numbers", COMPLETIONS, member("bad_words", repeated(b"1", MANY))),
        raw("bad_words: 300k numbers", COMPLETIONS, member("bad_words", repeated(b"1", 300_000))),
        raw("bad_words: 300k strings", COMPLETIONS, member("bad_words", repeated(b'"a"', 300_000))),
        raw("logit_bias: 100k", COMPLETIONS, member("logit_bias", keys(100_000))),
        raw("logit_bias: 100k wrong", COMPLETIONS, member("logit_bias", keys(100_000, '"x"'))),
        raw("logit_bias: 1M", COMPLETIONS, member("logit_bias", keys(1_000_000))),
        raw("allowed_token_ids: 900k", COMPLETIONS, member("allowed_token_ids", repeated(b"5", 900_000))),
        raw("messages: 2M numbers", MESSAGES, member("messages", repeated(b"1", MANY), b'"max_tokens":1')),
        raw("stop_sequences: 2M numbers", MESSAGES, member("stop_sequences", repeated(b"1", MANY), HI_JSON)),
        raw("messages of Chat: 2M numbers", CHAT, member("messages", repeated(b"1", MANY), b'"max_tokens":1')),
        raw("messages of Chat: 400k of {}", CHAT, member("messages", repeated(b"{}", 400_000), b'"max_tokens":1')),
        raw("tools: 2M of {}", CHAT, member("tools", repeated(b"{}", MANY), HI_JSON)),
        raw("input: 2M of {}", RESPONSES, member("input", repeated(b"{}", MANY), b'"max_output_tokens":1')),
        raw("input: 2M lists", EMBEDDINGS, member("input", repeated(b"[]", MANY), b'"user":"a"')),
        raw("prompt: 2M of []", COMPLETIONS, member("prompt", repeated(b"[]", MANY), b'"max_tokens":1')),
        raw("tokens: 2M of 1.5", "/detokenize", member("tokens", repeated(b"1.5", MANY), b'"a":1')),
        raw("tokens: 16M ids", "/detokenize", member("tokens", repeated(b"5", 16_000_000), b'"a":1')),
        raw("tokens: 900k ids", "/detokenize", member("tokens", repeated(b"5", 900_000), b'"a":1')),
        # JSON itself.
        raw("32 MB of []", COMPLETIONS, member("prompt", repeated(b"[]", 11_000_000), b'"a":1')),
        raw(
            '32 MB of {"a":1}',
            COMPLETIONS,
            member("x", repeated(b'{"a":1}', 4_000_000), b'"prompt":"a","max_tokens":1'),
        ),
        raw('32 MB of ""', COMPLETIONS, member("x", repeated(b'""', 11_000_000), b'"prompt":"a","max_tokens":1')),
        raw("32 MB of unique names", COMPLETIONS, member("x", keys(2_800_000), b'"prompt":"a","max_tokens":1')),
        raw("900k unique names", COMPLETIONS, member("x", keys(900_000 // 2), b'"prompt":"a","max_tokens":1')),
        raw('450k of {"a":1}', COMPLETIONS, member("x", repeated(b'{"a":1}', 300_000), b'"prompt":"a","max_tokens":1')),
        raw("900k of []", COMPLETIONS, member("x", repeated(b"[]", 480_000), b'"prompt":"a","max_tokens":1')),
        raw("900k of {}", COMPLETIONS, member("x", repeated(b"{}", 480_000), b'"prompt":"a","max_tokens":1')),
        raw(
            "duplicate names: 2M",
            COMPLETIONS,
            lambda: b"{" + b'"temperature":1,' * MANY + b'"prompt":"a","max_tokens":1}',
        ),
        raw(
            "duplicate names: 400k",
            COMPLETIONS,
            lambda: b"{" + b'"temperature":1,' * 400_000 + b'"prompt":"a","max_tokens":1}',
        ),
        raw("unknown fields: 400k", COMPLETIONS, lambda: keys(400_000)()[:-1] + b',"prompt":"a","max_tokens":1}'),
        raw("depth 16M", COMPLETIONS, lambda: b'{"prompt":' + b"[" * 16_000_000 + b"]" * 16_000_000 + b"}"),
        raw("depth 100k", COMPLETIONS, lambda: b'{"prompt":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}"),
        raw("depth 150", CHAT, lambda: b'{"tools":' + b"[" * 150 + b"]" * 150 + b"," + HI_JSON + b"}"),
        raw("an integer of 32M digits", COMPLETIONS, member("seed", lambda: b"9" * (32 * 10**6))),
        raw("integers of 4000 digits", COMPLETIONS, member("stop_token_ids", repeated(b"9" * 4000, 7_000))),
        raw("unknown integers of 4000 digits", COMPLETIONS, member("x", repeated(b"9" * 4000, 7_000))),
        raw("prompt of integers of 4000 digits", COMPLETIONS, member("prompt", repeated(b"9" * 4000, 7_000), b'"a":1')),
        raw("a float of 32M digits", COMPLETIONS, member("temperature", lambda: b"0." + b"9" * (32 * 10**6))),
        raw("1e400", COMPLETIONS, member("temperature", lambda: b"1e400")),
        raw("NaN", COMPLETIONS, member("temperature", lambda: b"NaN")),
        raw("32 MB of spaces", COMPLETIONS, lambda: b'{"prompt":"a","max_tokens":1' + b" " * (32 * 10**6) + b"}"),
        raw("32 MB of escapes", COMPLETIONS, member("user", lambda: b'"' + b"\\u00e9" * 5_300_000 + b'"')),
        raw("32 MB not JSON", COMPLETIONS, lambda: b'{"prompt":"' + b"a" * (32 * 10**6)),
        raw("32 MB of backslashes", COMPLETIONS, lambda: b'{"prompt":"' + b"\\" * (32 * 10**6)),
        raw("a name of 32 MB", COMPLETIONS, lambda: b'{"' + b"a" * (32 * 10**6) + b'":1,"prompt":"a","max_tokens":1}'),
        raw("a model of 32 MB", COMPLETIONS, member("model", lambda: b'"' + b"a" * (32 * 10**6) + b'"')),
        raw("a user of 32 MB", COMPLETIONS, member("user", lambda: b'"' + b"a" * (32 * 10**6) + b'"')),
        raw("pooling of 10 MB", EMBEDDINGS, member("pooling", lambda: b'"' + b"a" * (10**7) + b'"', b'"input":"a"')),
        raw(
            "reasoning_effort of 10 MB", CHAT, member("reasoning_effort", lambda: b'"' + b"a" * (10**7) + b'"', HI_JSON)
        ),
    ]
    # Text.
    texts: dict[str, Callable[[int], str]] = {
        "digits": lambda n: "7" * n,
        "spaces": lambda n: " " * n,
        "a word": lambda n: "a" * n,
        "newlines": lambda n: "\n" * n,
        "mixed whitespace": lambda n: (" \n\t" * n)[:n],
        "punctuation": lambda n: "!?" * (n // 2),
        "Chinese": lambda n: "国家" * (n // 6),
        "emoji": lambda n: "🌳" * (n // 4),
        "control tokens": lambda n: "<|im_start|>" * (n // 12),
        "look-alikes": lambda n: "<" * n,
        "English": lambda n: ("the quick brown fox jumps over the lazy dog " * (n // 44 + 1))[:n],
    }
    for name, make in texts.items():
        for path, wrap in (
            (TOKENIZE, lambda text: {"prompt": text}),
            (COMPLETIONS, lambda text: {"prompt": text, "max_tokens": 1}),
            (CHAT, lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
        ):
            for size in (12_000_000, 500_000):
                found.append(
                    Attack(
                        f"{path} {size // 1000}k {name}",
                        path,
                        lambda m=make, w=wrap, s=size: json.dumps(w(m(s))).encode(),
                    )  # type: ignore[misc]
                )
    digits = "7" * 12_000_000
    found += [
        attack("count_tokens: digits", MESSAGES + "/count_tokens", messages=[{"role": "user", "content": digits}]),
        attack("input_tokens: digits", RESPONSES + "/input_tokens", input=digits),
        attack("messages: digits", MESSAGES, messages=[{"role": "user", "content": digits}], max_tokens=1),
        attack("responses: digits", RESPONSES, input=digits, max_output_tokens=1),
        attack("responses: digits, truncation", RESPONSES, input=digits, max_output_tokens=1, truncation="auto"),
        attack("responses: 9,999 items, truncation", RESPONSES, input=[{"role": "user", "content": "7" * 1000}] * 9_999, max_output_tokens=1, truncation="auto"),
        attack("embeddings: digits", EMBEDDINGS, input=digits),
        attack("embeddings: 2048 of digits", EMBEDDINGS, input=["7" * 6000] * 2048),
        attack("embeddings: 2048 of digits, cut", EMBEDDINGS, input=["7" * 6000] * 2048, truncate_prompt_tokens=1),
        attack("embeddings: 2048 of 4 words", EMBEDDINGS, input=["one two three four"] * 2048),
        attack("embeddings: digits, cut", EMBEDDINGS, input=digits, truncate_prompt_tokens=5),
        attack("completions: 1024 of digits", COMPLETIONS, prompt=["7" * 8300] * 1024, max_tokens=1),
        attack("completions: digits, truncated", COMPLETIONS, prompt=digits, max_tokens=1, truncate_prompt_tokens=5),
        attack("tokenize with names", TOKENIZE, prompt="7" * 500_000, return_token_strs=True),
        # Chats.
        attack("chat: 10,000 messages", CHAT, messages=HI * 10_000, max_tokens=1),
        attack("chat: 10,000 messages of 10 parts", CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}] * 10}] * 10_000, max_tokens=1),
        attack("chat: 100,000 parts", CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}] * 100_000}], max_tokens=1),
        attack("chat: 10,000 calls", CHAT, messages=[*HI, {"role": "assistant", "content": None, "tool_calls": [{"id": f"{at}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for at in range(10_000)]}], max_tokens=1),
        attack("chat: 10,000 tools", CHAT, messages=HI, tools=tools(10_000), max_tokens=1),
        attack("chat: 10,000 tools, required", CHAT, messages=HI, tools=tools(10_000), tool_choice="required", max_tokens=1),
        attack("chat: 100,000 template variables", CHAT, messages=HI, chat_template_kwargs={f"a{at}": at for at in range(100_000)}, max_tokens=1),
        attack("chat: metadata of 100,000", CHAT, messages=HI, metadata={f"a{at}": "b" for at in range(100_000)}, max_tokens=1),
        attack("chat: deep arguments", CHAT, messages=[*HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":' * 900 + "1" + "}" * 900}}]}], max_tokens=1),
        attack("chat: arguments of 2M items", CHAT, messages=[*HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":[' + "[]," * MANY + "1]}"}}]}], max_tokens=1),
        attack("chat: arguments of long integers", CHAT, messages=[*HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":[' + ("9" * 4000 + ",") * 5_000 + "1]}"}}]}], max_tokens=1),
        attack("responses: arguments of 2M items", RESPONSES, input=[{"type": "function_call", "call_id": "x", "name": "f", "arguments": '{"a":[' + "[]," * MANY + "1]}"}], max_output_tokens=1),
        attack("messages: 10,000 tools", MESSAGES, messages=HI, max_tokens=1, tools=[{"name": f"f{at}", "input_schema": {"type": "object"}} for at in range(10_000)]),
        attack("messages: 100,000 blocks", MESSAGES, messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}] * 100_000}], max_tokens=1),
        attack("responses: 10,000 items", RESPONSES, input=[{"role": "user", "content": "hi"}] * 9_999, max_output_tokens=1),
        attack("responses: 10,000 tools", RESPONSES, input="hi", max_output_tokens=1, tools=[{"type": "function", "name": f"f{at}", "parameters": {"type": "object"}} for at in range(10_000)]),
        attack("responses: allowed 10,000 of 10,000 tools", RESPONSES, input="hi", max_output_tokens=1, tools=[{"type": "function", "name": f"f{at}", "parameters": {"type": "object"}} for at in range(10_000)], tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": f"f{at}"} for at in range(10_000)]}),
        attack("responses: include of 300,000", RESPONSES, input="hi", max_output_tokens=1, include=["message.output_text.logprobs"] * 300_000),
        # Answers.
        attack("prompt_logprobs: 20 of 6,000 tokens", COMPLETIONS, prompt=[5 + at % 1000 for at in range(6_000)], max_tokens=1, prompt_logprobs=20),
        attack("echo, logprobs: 20 of 6,000 tokens", COMPLETIONS, prompt=[5 + at % 1000 for at in range(6_000)], max_tokens=1, echo=True, logprobs=20),
        attack("chat: prompt_logprobs: 20", CHAT, messages=[{"role": "user", "content": "one two three four " * 1_400}], max_tokens=1, prompt_logprobs=20),
        attack("n: 64 × logprobs", COMPLETIONS, prompt="a", n=64, max_tokens=20, logprobs=20, ignore_eos=True),
        attack("n: 64 × 64 stops of 1024", COMPLETIONS, prompt="a", n=64, max_tokens=20, stop=[("ab" * 511) + f"{at:02}" for at in range(64)], ignore_eos=True),
        attack("1024 prompts × n: 64", COMPLETIONS, prompt=["a"] * 1024, n=64, max_tokens=1),
        attack("1024 prompts", COMPLETIONS, prompt=["a"] * 1024, max_tokens=1),
        attack("1024 prompts echo × stops", COMPLETIONS, prompt=["a"] * 1024, max_tokens=1, stop=[("ab" * 511) + f"{at:02}" for at in range(64)]),
    ]  # fmt: skip
    return found + at_the_limit()


def at_the_limit() -> list[Attack]:
    """As large as the limits allow, or nearly: these are answered, or refused by a later check; alone and eight at a time."""
    found = [
        raw("limit: 110k names", COMPLETIONS, member("x", keys(110_000), b'"prompt":"a","max_tokens":1')),
        raw("limit: 110k unknown fields", COMPLETIONS, lambda: keys(110_000)()[:-1] + b',"prompt":"a","max_tokens":1}'),
        raw("limit: 320k lists", COMPLETIONS, member("x", repeated(b"[]", 320_000), b'"prompt":"a","max_tokens":1')),
        raw("limit: 80k objects", COMPLETIONS, member("x", repeated(b'{"a":1}', 80_000), b'"prompt":"a","max_tokens":1')),
        raw("limit: 930k ids", COMPLETIONS, member("prompt", repeated(b"5", 930_000), b'"max_tokens":1')),
        raw("limit: 127 digits", COMPLETIONS, member("x", repeated(b"9" * 127, 190_000), b'"prompt":"a","max_tokens":1')),
        raw("limit: 325k strings", COMPLETIONS, member("x", repeated(b'"abcdefghijklmnop"', 325_000), b'"prompt":"a","max_tokens":1')),
        attack("limit: 262k allowed ids", COMPLETIONS, prompt=["a"] * 8, max_tokens=1, allowed_token_ids=list(range(49_152)) * 5),
        attack("limit: 2048 inputs of 440 ids", EMBEDDINGS, input=[[5] * 8300] + [[5] * 440] * 2047),
        attack("limit: 1024 prompts of 900 ids", COMPLETIONS, prompt=[[5] * 900] * 1023 + [[5] * 8300], max_tokens=1),
        attack("limit: 1023 prompts of 2k characters", COMPLETIONS, prompt=["one two " * 250] * 1023 + ["x " * 9000], max_tokens=1),
        attack("limit: tokenize 2M of English", TOKENIZE, prompt="the quick brown fox jumps over the lazy dog " * 47_600),
        attack("limit: tokenize 2M of digits", TOKENIZE, prompt="777777777 " * 209_000),
        attack("limit: tokenize 2M of digits, names", TOKENIZE, prompt="777777777 " * 209_000, return_token_strs=True),
        attack("limit: tokenize 262k digits", TOKENIZE, prompt="7" * 262_000),
        attack("limit: chat of 2M look-alikes", CHAT, messages=[{"role": "user", "content": "<|im_start|> " * 161_000}], max_tokens=1),
        attack("limit: chat of 9,999 messages of 200", CHAT, messages=[{"role": "user", "content": "one two " * 24}] * 9_999, max_tokens=1),
        attack("limit: responses of 9,999 messages, truncation", RESPONSES, input=[{"role": "user", "content": "one two " * 20}] * 9_999, max_output_tokens=1, truncation="auto"),
        attack("limit: 1024 tools of 1k", CHAT, messages=HI, max_tokens=1, tools=[{"type": "function", "function": {"name": f"f{at}", "parameters": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(30)}}}} for at in range(1024)]),
        attack("limit: 1024 tools of 1k, required", CHAT, messages=HI, max_tokens=1, tool_choice="required", tools=[{"type": "function", "function": {"name": f"f{at}", "parameters": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(30)}}}} for at in range(1024)]),
        attack("limit: arguments of 2M characters", CHAT, messages=[*HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":[' + "[]," * 499_000 + "1]}"}}]}], max_tokens=1),
        attack("limit: detokenize 262k long tokens", "/detokenize", tokens=[40_000 + at % 9_000 for at in range(262_144)]),
        attack("limit: echo of 100 prompts of 8000 ids", COMPLETIONS, prompt=[[5] * 8_000] * 2, echo=True, max_tokens=1),
        raw("limit: 32 MB of text", COMPLETIONS, member("user", lambda: b'"' + "é国".encode() * 6_400_000 + b'"')),
    ]  # fmt: skip
    return found + [dataclasses.replace(one, name=f"8 × {one.name}", times=8) for one in found[:7] + found[11:22]]


def watch_health(port: int, asked: "Connection[Any, Any]") -> None:
    """From one message to the next, ask for /health; then answer with the longest time, in seconds."""
    while True:
        asked.recv()
        longest = 0.0
        while not asked.poll(PAUSE_S):
            http_client = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_LIMIT_S)
            started = time.monotonic()
            with contextlib.suppress(http.client.HTTPException):
                http_client.request("GET", "/health")
                http_client.getresponse().read()
            longest = max(longest, time.monotonic() - started)
            http_client.close()
        asked.recv()
        asked.send(longest)


def memory(pid: int, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def send(port: int, one: Attack, body: bytes) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_LIMIT_S)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent: the answer is there
        connection.request("POST", one.path, body, {"Content-Type": "application/json"})
    try:
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error)
    finally:
        connection.close()


def words_of(text: str) -> str:
    try:
        error = json.loads(text)["error"]
        return f"{len(error['message'])}: {error['message'][:150]}"
    except (ValueError, KeyError, TypeError):
        return f"{len(text)} characters"


def run(house: House, chosen: list[Attack]) -> bool:
    (pid,) = house.servers()
    ours, theirs = multiprocessing.Pipe()
    watcher = multiprocessing.Process(target=watch_health, args=(house.port, theirs), daemon=True)
    watcher.start()
    is_well = True
    send(house.port, attack("first", CHAT, messages=HI, max_tokens=1), json.dumps({"messages": HI}).encode())
    time.sleep(IDLE_S)
    before = memory(pid, "VmRSS")
    for one in chosen:
        body = one.body()
        time.sleep(IDLE_S)
        reset_peak(pid)
        ours.send("ask")
        started = time.monotonic()
        with ThreadPoolExecutor(one.times) as senders:
            answers = list(senders.map(send, [house.port] * one.times, [one] * one.times, [body] * one.times))
        status, text = max(answers, key=lambda answer: (answer[0] >= 500 or not answer[0], answer[0]))
        took = time.monotonic() - started
        ours.send("tell")
        health, gained = ours.recv(), memory(pid, "VmHWM") - before
        over = [
            name
            for name, is_over in (
                ("HEALTH", health > HEALTH_LIMIT_S),
                ("MEMORY", gained > one.times * (MEMORY_LIMIT + 2 * len(body))),
                ("STATUS", not 0 < status < 500),
            )
            if is_over
        ]
        is_well = is_well and not over
        print(
            f"{one.name} | {len(body) / 1e6:.1f} MB | {status} | {took:.2f} s | health {health * 1000:.0f} ms | "
            f"+{gained / 1e6:.0f} MB | {' '.join(over) or 'ok'} | {words_of(text)}",
            flush=True,
        )
        del body
    watcher.terminate()
    return is_well and os.path.exists(f"/proc/{pid}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", help="only attacks whose name contains one of these (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of the attacks")
    args = parser.parse_args()
    chosen = [one for one in attacks() if not args.names or any(name in one.name for name in args.names)]
    if args.list:
        print("\n".join(one.name for one in chosen))
        return 0
    if not chosen:
        parser.error(f"no attack has {' or '.join(args.names)} in its name; --list prints them")
    with House(
        "--api-processes", "1", "--device", "cpu", "--max-num-batched-tokens", "512", log=os.environ.get("LOG", "")
    ) as house:
        return 0 if run(house, chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
