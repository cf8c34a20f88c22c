"""What clients send to be compiled costs no more than its request: chains, bombs, floods, clients that leave."""

import asyncio
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from octavo.errors import InvalidRequest
from octavo.observe.metrics.http_metrics import OUTCOMES
from octavo.server.state.service import Service
from octavo.text import load_text
from octavo.text.chat.template import request_template
from octavo.text.grammar.limits import MAX_OPTIONAL, MAX_REFERENCES, MAX_RULES, parser_limits
from tests.doubles import REPORT, AsgiCall, ScriptedEngine, byte_text, never_ends, write_byte_tokenizer
from tests.server.conftest import Serve, error_of
from tests.server.running import Served

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
SMALL = {"type": "object", "properties": {"a": {"type": "integer"}}}
POOL_MB = 100  # of all processes of the sandbox together


def service_of(client: Any) -> Service:
    service: Service = client.app.state.service
    return service


def chain(length: int, link: Callable[[dict[str, str]], Any], last: Any = None) -> Any:
    """A schema with a chain of references, each within a `link`."""
    parts = {f"a{at}": link({"$ref": f"#/$defs/a{at + 1}"}) for at in range(length - 1)}
    return {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{length - 1}": last or {"type": "integer"}}}


def object_of(part: Any) -> Any:
    return {"type": "object", "properties": {"x": part}, "required": ["x"], "additionalProperties": False}


LINKS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "plain": (4000, lambda part: part),
    "anyOf": (1050, lambda part: {"anyOf": [part, {"type": "null"}]}),
    "oneOf": (1050, lambda part: {"oneOf": [part, {"type": "null"}]}),
    "allOf": (2500, lambda part: {"allOf": [part]}),
    "object": (1000, object_of),
    "items": (2500, lambda part: {"type": "array", "items": part}),
    "prefixItems": (1500, lambda part: {"type": "array", "prefixItems": [part], "minItems": 1}),
    "additionalProperties": (2500, lambda part: {"type": "object", "additionalProperties": part}),
    "patternProperties": (1500, lambda part: {"type": "object", "patternProperties": {"^x": part}}),
}
RULES = {
    "rules": (2673, "r{0}: r{1}\n"),
    "rules with choices": (5000, 'r{0}: "a" r{1} | "b"\n'),
    "terminals": (5000, "R{0}: R{1}\n"),
    "terminals that repeat": (10_000, 'R{0}: ("a" R{1})?\n'),
}


def lark(length: int, rule: str) -> str:
    first = rule[0]
    rules = "".join(rule.format(at, at + 1) for at in range(length))
    return f'start: {first}0\n{rules}{first}{length}: "x"\n'


def gbnf(length: int) -> str:
    return "root ::= r0\n" + "".join(f"r{at} ::= r{at + 1}\n" for at in range(length)) + f'r{length} ::= "x"\n'


ATTACKS: dict[str, dict[str, Any]] = {
    **{name: {"json": chain(length, link)} for name, (length, link) in LINKS.items()},
    **{name: {"grammar": lark(length, rule)} for name, (length, rule) in RULES.items()},
    "GBNF": {"grammar": gbnf(3000)},
    "deep between references": {"json": chain(400, lambda part: object_of(object_of(object_of(object_of(part)))))},
}


@pytest.mark.parametrize("name", ATTACKS)
async def test_a_chain_is_refused_and_a_bystander_streams_on(serve: Serve, name: str) -> None:
    engine = ScriptedEngine(never_ends)
    client = serve(engine)
    bystander = AsgiCall(client.app, "POST", CHAT, json.dumps({**BODY, "stream": True}).encode())  # type: ignore[attr-defined]
    await bystander.until(lambda call: bool(call.sent))
    engine.gate.clear()
    (kind,) = ATTACKS[name]
    response = await client.post(CHAT, json={**BODY, "structured_outputs": ATTACKS[name]})
    error = error_of(response, 400)
    assert error["param"] == f"structured_outputs.{kind}", error
    assert any(words in error["message"] for words in (" chain ", "nested too deeply")), error
    num_sent = len(bystander.sent)
    engine.gate.set()
    await bystander.until(lambda call: len(call.sent) > num_sent)
    bystander.leave()
    await bystander.done()
    engine.script = ScriptedEngine().script
    response = await client.post(CHAT, json={**BODY, "structured_outputs": {"json": SMALL}})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", [name for name in LINKS if name != "oneOf"])  # not certain to have one that applies
async def test_a_chain_within_the_limit_is_compiled(serve: Serve, name: str) -> None:
    link = LINKS[name][1]
    response = await serve().post(CHAT, json={**BODY, "guided_json": chain(MAX_REFERENCES, link, {"type": "string"})})
    assert response.status_code == 200, response.text


async def test_a_chain_of_rules_within_the_limit_is_compiled(serve: Serve) -> None:
    client = serve()
    for grammar in (lark(MAX_RULES - 2, RULES["rules with choices"][1]), lark(MAX_RULES - 2, RULES["terminals"][1])):
        response = await client.post(CHAT, json={**BODY, "guided_grammar": grammar})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("limits", "flag"),
    [({"grammar_seconds": 0.2}, "--grammar-seconds"), ({"grammar_memory_bytes": 2**27}, "--grammar-memory")],
)
async def test_what_takes_too_much_is_refused_by_the_limit(serve: Serve, limits: dict[str, Any], flag: str) -> None:
    client = serve(**limits)
    error = error_of(await client.post(CHAT, json={**BODY, "guided_regex": "a?" * 32_000}), 400)
    assert error["param"] == "guided_regex" and flag in error["message"], error
    assert (await client.post(CHAT, json={**BODY, "guided_regex": "a?"})).status_code == 200


def optional(num_properties: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(num_properties)}}


async def test_many_optional_properties_are_enforced(serve: Serve) -> None:
    schema = optional(510)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for fields, start in (
        ({"guided_json": schema}, b'{"p0":1,"p509":2}'),
        ({"tools": [tool], "tool_choice": "required"}, b'<tool_call>\n{"name": "f", "arguments": {"p509": 1}'),
    ):
        engine = ScriptedEngine(report=msgspec.structs.replace(REPORT, max_model_len=100_000))
        response = await serve(engine).post(CHAT, json={**BODY, **fields})
        assert response.status_code == 200, response.text
        grammar = engine.requests[0].params.grammar
        matcher = LLMatcher(byte_text().vocabulary.stand_in, grammar, log_level=0, limits=parser_limits())
        assert matcher.try_consume_tokens([*start]) == len(start), matcher.get_error()


@pytest.mark.parametrize(
    "schema",
    [
        optional(MAX_OPTIONAL + 1),
        {"type": "object", "properties": {"a": optional(MAX_OPTIONAL + 1)}},
        {"allOf": [optional(MAX_OPTIONAL), {"type": "object", "properties": {f"q{at}": {} for at in range(600)}}]},
    ],
    ids=["one object", "an object inside", "two objects joined"],
)
async def test_more_are_refused(serve: Serve, schema: Any) -> None:
    error = error_of(await serve().post(CHAT, json={**BODY, "guided_json": schema}), 400)
    assert error["param"] == "guided_json" and (
        "optional properties" in error["message"] or "too many properties" in error["message"]
    )


def heavy(client: Any, at: int) -> AsgiCall:
    """A request whose regex takes minutes."""
    body = {**BODY, "guided_regex": "a?" * (30_000 + at)}
    return AsgiCall(client.app, "POST", CHAT, json.dumps(body).encode())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (of other processes)
            await asyncio.sleep(0.01)


UNLIMITED = {"grammar_seconds": 600.0, "grammar_memory_bytes": 2**34}


async def test_clients_that_leave_hold_up_nothing(serve: Serve, tmp_path: Path) -> None:
    """Their jobs end, those that wait are dropped, and files are listed at once meanwhile."""
    client = serve(files_folder=str(tmp_path), **UNLIMITED)
    pool = service_of(client).compiler.pool
    calls = [heavy(client, at) for at in range(8)]
    await until(lambda: pool.num_running >= 1 and pool.num_running + pool.num_waiting == 8)
    async with asyncio.timeout(5):
        assert (await client.get("/v1/files")).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.post(CHAT, json={**BODY, "guided_json": SMALL})).status_code == 200
    for call in calls:
        call.leave()
    for call in calls:
        await call.done()
    await until(lambda: not pool.num_running + pool.num_waiting)
    assert (await client.post(CHAT, json={**BODY, "guided_json": {"type": "null"}})).status_code == 200


async def test_a_full_queue_asks_to_come_back(serve: Serve) -> None:
    client = serve(grammar_processes=1, max_waiting_grammars=2, **UNLIMITED)
    pool = service_of(client).compiler.pool
    held = [heavy(client, 0)]
    await until(lambda: pool.num_running == 1)
    held += [heavy(client, 1), heavy(client, 2)]
    await until(lambda: pool.num_waiting == 2)
    response = await client.post(CHAT, json={**BODY, "guided_json": SMALL})
    error = error_of(response, 429)
    assert "--max-waiting-grammars" in error["message"] and int(response.headers["retry-after"]) > 0
    for call in held:
        call.leave()
    for call in held:
        await call.done()


async def test_equal_grammars_are_compiled_once(served: Callable[..., Served]) -> None:
    one = served()
    body = {**BODY, "guided_json": SMALL, "max_tokens": 1, "ignore_eos": True}
    await asyncio.gather(*[one.http.post(CHAT, json=body) for _ in range(5)])
    for wrong in range(2):
        assert (await one.http.post(CHAT, json={**body, "guided_json": {"type": "strin"}})).status_code == 400, wrong
    jobs = await _jobs(one)
    assert jobs["done"] == 5 and jobs["refused"] == 2, "those that came together share a job"
    await one.http.post(CHAT, json=body)
    assert (await _jobs(one))["kept"] == 1
    assert {*jobs} == {*OUTCOMES}


async def _jobs(one: Served) -> dict[str, int]:
    text = (await one.http.get("/metrics")).text
    found = re.findall(r'^octavo:compile_jobs_total\{.*outcome="(\w+)".*\} (\S+)$', text, re.M)
    return {outcome: int(float(times)) for outcome, times in found}


async def test_errors_of_the_same_verdict_name_each_dialects_fields(serve: Serve) -> None:
    """A verdict that is kept is not changed by the request that it is raised for."""
    client = serve()
    schema = {"type": "object", "properties": {"a": {"not": {"pattern": "b"}}}}
    tool = {"name": "f", "input_schema": schema}
    anthropic = {"max_tokens": 4, **BODY, "tools": [tool], "tool_choice": {"type": "tool", "name": "f"}}
    openai = {**BODY, "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
    for _ in range(2):
        other = (await client.post("/v1/messages", json=anthropic)).json()["error"]["message"]
        own = error_of(await client.post(CHAT, json={**openai, "tool_choice": "required"}), 400)["message"]
        assert "'not'" in own and "'not'" in other


async def test_the_sandbox_starts_with_the_first_grammar_and_takes_little(serve: Serve) -> None:
    client = serve()
    service = service_of(client)
    assert (await client.post(CHAT, json=BODY)).status_code == 200
    assert (await client.post(CHAT, json={**BODY, "structured_outputs": {}})).status_code == 400
    assert not service.compiler.is_started
    assert (await client.post(CHAT, json={**BODY, "guided_json": SMALL})).status_code == 200
    assert service.compiler.is_started
    if sys.platform == "linux":
        await asyncio.sleep(0.2)  # its next process is being forked
        assert sum(_pss_kib(service.compiler.pool.server_process)) < POOL_MB * 1024


def _pss_kib(server: int | None) -> list[int]:
    """Of the fork server and its children, as far as the system shows it."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    found = []
    for process in [str(server), *children]:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        found += [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    assert found
    return found


TEMPLATES = [
    "{{ messages | tojson }}{{ messages[0].content | upper | center(20) | trim | wordwrap(4) }}",
    "{{ strftime_now('%Y-%m-%d') }}{{ '<b>x</b>' | striptags }}{{ messages | pprint }}",
    "{% macro f(a) %}[{{ a }}]{% endmacro %}{{ f(1) }}{{ 'é' | urlencode }}{{ 'www.example.org' | urlize }}",
    "{{ {'a': 1} | xmlattr }}{{ [3, 1] | sort | first }}{{ '%05d' % 3 }}{{ dict(a=1).items() | list }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ raise_exception('no') }}",
    "{{ nothing.at.all }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
async def test_a_template_renders_as_in_this_process(serve: Serve, source: str) -> None:
    """A job loads nothing: all that templates use was loaded before."""
    text = byte_text()
    try:
        expected = text.with_template(request_template(source, text.template_variables)).encode_chat(BODY["messages"])
    except InvalidRequest as error:
        words = error.message
        expected = []
    response = await serve(trust_request_chat_template=True).post("/tokenize", json={**BODY, "chat_template": source})
    if expected:
        assert response.json()["tokens"] == expected
    else:
        assert error_of(response, 400)["message"] == words


async def test_a_requests_template_has_the_operators_variables(serve: Serve, tmp_path: Path) -> None:
    """They are JSON of any type, and reach the process that compiles; without it, no request with a schema was answered either."""
    write_byte_tokenizer(tmp_path)
    text = load_text(tmp_path, default_chat_template_kwargs='{"thinking": false, "more": {"a": [1, null]}}')
    client = serve(text=text, trust_request_chat_template=True)
    body = {**BODY, "chat_template": "{{ thinking }} {{ more.a | tojson }} {{ messages[0].role }}"}
    shown = (await client.post("/apply-template", json=body)).json()
    assert shown == {"prompt": "False [1, null] user"}
    asked = await client.post("/apply-template", json={**body, "chat_template_kwargs": {"thinking": True}})
    assert asked.json()["prompt"].startswith("True ")


async def test_a_template_is_compiled_once(served: Callable[..., Served]) -> None:
    one = served(trust_request_chat_template=True)
    for _ in range(3):
        body = {**BODY, "chat_template": "{{ messages[0].content }}", "max_tokens": 1, "ignore_eos": True}
        assert (await one.http.post(CHAT, json=body)).status_code == 200
    jobs = await _jobs(one)
    assert jobs["kept"] == 2 and jobs["done"] == 1 + 3, "compiled once, rendered each time"


@pytest.mark.parametrize(
    "source",
    [
        "{{ '{:.{}f}'.format(1.5, 2000000000) }}",
        "{{ (' ' * 1000000) | wordwrap(1) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    ],
)
async def test_a_template_that_takes_too_much_is_refused(serve: Serve, source: str) -> None:
    client = serve(trust_request_chat_template=True, grammar_seconds=1.0)
    error = error_of(await client.post(CHAT, json={**BODY, "chat_template": source}), 400)
    assert error["param"] in ("chat_template", "messages")
    assert (await client.post(CHAT, json=BODY)).status_code == 200


async def test_a_server_that_stops_does_not_wait_for_jobs(serve: Serve) -> None:
    client = serve(**UNLIMITED)
    call = heavy(client, 0)
    await until(lambda: service_of(client).compiler.pool.num_running == 1)
    service_of(client).stop()
    await call.done()
    assert call.status == 503
