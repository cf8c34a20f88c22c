"""Journeys as OpenTelemetry spans: one for the request, by the conventions for generative AI, and one for each of its stages.

Needs the extra `otel`, which is loaded only where an endpoint is configured."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from octavo.errors import ConfigError
from octavo.observe.journeys.journey import Journey, OpenJourney
from octavo.observe.journeys.stages import Stage

FLUSH_SECONDS = 2.0
COLLECTORS_PATH = "v1/traces"
"""The path at which a collector accepts spans over HTTP."""
OPERATIONS = {"chat": "chat", "messages": "chat", "responses": "chat", "completions": "text_completion",
              "embeddings": "embeddings"}  # fmt: skip


class Traces:
    """Makes spans when a request is over, with the recorded times; a thread sends them."""

    def __init__(self, endpoint: str, model_name: str, version: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint needs OpenTelemetry ({error.name} is missing): pip install 'octavo[otel]'"
            ) from None
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
        resource = Resource.create({"service.version": version})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "octavo"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint))))
        self._tracer = self._provider.get_tracer("octavo", version)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def export(self, journey: Journey, opened: OpenJourney) -> None:
        if not opened.requests:
            return  # nothing was generated
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.status import Status, StatusCode

        parent = self._propagator.extract(opened.trace_context)
        zero = int(journey.received_at * 1e9)
        attributes = request_attributes(journey, opened, self._model_name)
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {self._model_name}",
            parent,
            SpanKind.SERVER,
            attributes,
            start_time=zero,
        )
        inside = set_span_in_context(span, parent)
        for stage in journey.stages:
            part = self._tracer.start_span(
                stage.name, inside, attributes=stage_attributes(stage), start_time=zero + int(stage.start * 1e9)
            )
            part.end(zero + int(stage.end * 1e9))
        if journey.state != "finished":
            span.set_status(Status(StatusCode.ERROR, journey.error or journey.state))
        span.end(zero + int(journey.seconds * 1e9))

    def close(self) -> None:
        """Send what is waiting, for FLUSH_SECONDS at most."""
        self._provider.force_flush(int(FLUSH_SECONDS * 1000))


def traces_url(endpoint: str) -> str:
    """The endpoint with the collector's usual path, unless it has a path."""
    parts = urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else urlunsplit(parts._replace(path=COLLECTORS_PATH))


def request_attributes(journey: Journey, opened: OpenJourney, model_name: str) -> dict[str, Any]:
    kind = opened.handler.rstrip("/").rsplit("/", 1)[-1]
    name = OPERATIONS.get("chat" if "/chat/" in opened.handler else kind, "generate_content")
    seconds = journey.stage_seconds()
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": name,
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.response.id": journey.response_ids[0],
        "gen_ai.response.finish_reasons": [str(reason) for reason in journey.finish_reasons],
        "gen_ai.usage.input_tokens": journey.prompt_tokens,
        "gen_ai.usage.output_tokens": journey.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": journey.cached_tokens,
        # vLLM's own, for existing dashboards.
        "gen_ai.request.id": journey.id,
        "gen_ai.latency.time_in_queue": seconds.get("queue", 0.0),
        "gen_ai.latency.time_in_model_prefill": seconds.get("prefill", 0.0),
        "gen_ai.latency.time_in_model_decode": seconds.get("decode", 0.0),
        "gen_ai.latency.e2e": journey.seconds,
        "http.request.method": opened.method,
        "http.route": opened.handler,
        "http.response.status_code": journey.status,
        "octavo.preemptions": journey.preemptions,
        "octavo.api_process": journey.api_process,
    }
    if journey.first_byte_seconds is not None:
        attributes["gen_ai.latency.time_to_first_token"] = journey.first_byte_seconds
    for reason, spent in journey.wait_seconds().items():
        attributes[f"octavo.wait.{reason}"] = spent
    if journey.error or journey.state != "finished":
        attributes["error.type"] = journey.error.split(" ")[0] or journey.state
    return attributes | _wishes(opened)


def _wishes(opened: OpenJourney) -> dict[str, Any]:
    """Sampling parameters, of the request or the model's defaults."""
    params = opened.params
    if params is None:
        return {}
    wishes: Mapping[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": params.seed,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop_sequences": list(params.stop) or None,
        "choice.count": params.n if params.n > 1 else None,
    }
    return {f"gen_ai.request.{name}": value for name, value in wishes.items() if value is not None}


def stage_attributes(stage: Stage) -> dict[str, Any]:
    """The stage's numbers; of lists their length."""
    numbers = {
        "output_tokens": stage.output_tokens,
        "cached_tokens": stage.cached_tokens,
        "computed_tokens": stage.computed_tokens,
        "chunks": sum(1 + chunk.merged for chunk in stage.chunks),
        "capped_steps": stage.capped_steps,
        "swapped_tokens": stage.swapped_tokens,
        "dropped_tokens": stage.dropped_tokens,
        "steps": stage.steps,
        "mixed_steps": stage.mixed_steps,
        "mean_rows": stage.mean_rows,
        **{f"wait.{wait.reason}": wait.seconds for wait in stage.waits},
    }
    return {f"octavo.{name}": value for name, value in numbers.items() if value}
