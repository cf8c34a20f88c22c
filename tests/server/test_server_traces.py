"""Spans as they arrive at a receiver that speaks OTLP: names, times, parents and attributes."""

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from octavo.errors import ConfigError
from octavo.server.state.traces import Traces, traces_url
from tests.server.running import ask, engine

COMPLETIONS = "/v1/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Receiver(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[ExportTraceServiceRequest] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> list[Any]:
        return [span for request in self.requests for scope in self._scopes(request) for span in scope.spans]

    def _scopes(self, request: ExportTraceServiceRequest) -> list[Any]:
        return [scope for resource in request.resource_spans for scope in resource.scope_spans]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        assert self.path == "/v1/traces", "the path that collectors take spans at"
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        self.server.requests.append(request)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.shutdown()
    receiver.server_close()


def attributes(span: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(inner) for inner in found.values] if kind == "array_value" else found

    return {pair.key: value(pair.value) for pair in span.attributes}


async def test_a_journey_as_spans_in_the_clients_trace(served: Any, receiver: Receiver) -> None:
    server = served(engine(), otlp_traces_endpoint=receiver.url)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    answer = await server.http.post(COMPLETIONS, json=ask("hello", 5, temperature=0.5, seed=7), headers=headers)
    await server.http.get("/v1/models")  # nothing is generated: no span
    server.app.state.service.traces.close()
    resource = {
        pair.key: pair.value.string_value for pair in receiver.requests[0].resource_spans[0].resource.attributes
    }
    assert resource["service.name"] == "octavo" and resource["service.version"]
    spans = {span.name: span for span in receiver.spans()}
    whole = spans.pop("text_completion byte-model")
    assert (
        whole.trace_id.hex() == TRACE and whole.parent_span_id.hex() == PARENT and whole.kind == whole.SPAN_KIND_SERVER
    )
    found = attributes(whole)
    for name, value in {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "byte-model",
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.id": "mine",
        "http.response.status_code": 200,
        "http.route": COMPLETIONS,
    }.items():
        assert found[name] == value, name
    assert found["gen_ai.latency.e2e"] >= found["gen_ai.latency.time_to_first_token"] > 0
    wanted = ["receive", "parse", "tokenise", "hand_over", "queue", "prefill", "decode", "detokenise", "flush"]
    assert list(spans) == wanted
    at = whole.start_time_unix_nano
    for span in spans.values():
        assert span.parent_span_id == whole.span_id and span.trace_id == whole.trace_id
        assert abs(span.start_time_unix_nano - at) <= 2000
        at = span.end_time_unix_nano
    assert abs(at - whole.end_time_unix_nano) <= 2000
    assert attributes(spans["decode"])["octavo.output_tokens"] == 4
    assert attributes(spans["prefill"]) == {
        "octavo.output_tokens": 1, "octavo.computed_tokens": 5, "octavo.chunks": 1,
    }  # fmt: skip


async def test_a_client_that_is_not_sampled_is_not_traced(served: Any, receiver: Receiver) -> None:
    server = served(engine(), otlp_traces_endpoint=receiver.url)
    for flags in ("00", "01"):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "vendor=1"}
        await server.http.post(COMPLETIONS, json=ask(max_tokens=int(flags) + 1), headers=headers)
    await server.http.post(COMPLETIONS, json=ask(), headers={"traceparent": "nonsense"})
    server.app.state.service.traces.close()
    roots = [span for span in receiver.spans() if " " in span.name]
    assert [attributes(span)["gen_ai.usage.output_tokens"] for span in roots] == [2, 5]
    assert roots[0].trace_state == "vendor=1"
    assert roots[1].trace_id.hex() != TRACE and roots[1].parent_span_id == b""


def test_a_path_of_ones_own_is_kept() -> None:
    assert traces_url("http://gateway/collect?to=x") == "http://gateway/collect?to=x"
    assert traces_url("http://collector:4318/?a=b") == "http://collector:4318/v1/traces?a=b"


async def test_an_endpoint_where_nobody_listens_harms_nobody(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # It must give up before other tests begin: the waits between its tries draw from `random`, which Hypothesis watches.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    server = served(engine(), otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    assert (await server.http.post(COMPLETIONS, json=ask())).status_code == 200
    server.app.state.service.traces.close()


def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[otel\]'"):
        Traces("http://127.0.0.1:9", "m", "0")
