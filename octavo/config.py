"""The configuration: one frozen dataclass per subsystem. Every field is a command-line flag, with its default and help text,
and there are no other flags. limits.py resolves every `auto` that needs no measurement."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ConfigError

AUTO = "auto"
# Far beyond any real use. An upper bound rejects infinity, and values that would overflow later, at start-up.
MAX_GIB = 2**30
MAX_SECONDS = 10**9
MAX_AUTO_API_PROCESSES = 8
MAX_LOGPROBS = 20  # upper bound on the top logprobs per position that a request may ask for


def knob(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    flag: str = "",
    kind: str = "",
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Define a field that is also a flag. `flag`: the flag's names if they differ from the field's; `kind`: how to parse its text.
    `above` (exclusive), `least` and `most` (inclusive): bounds of a number; a field whose default is `auto` also accepts `auto`."""
    within = (above, least, most)
    return field(
        default=default, metadata={"help": help, "choices": choices, "flag": flag, "kind": kind, "within": within}
    )


def seconds(default: float, help: str) -> Any:
    """Define a field that holds a number of seconds, 0 included."""
    return knob(default, "seconds " + help, least=0, most=MAX_SECONDS)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model: str = knob("", "folder, .gguf file or hub id; empty: the embedded SmolLM2-135M-Instruct", flag="MODEL")
    tokenizer: str = knob("", "folder or file to take the tokenizer from; empty: the model's own")
    revision: str = knob("", "hub revision; empty: main")
    dtype: str = knob(
        AUTO,
        "type of arithmetic and of weights; auto: the checkpoint's on a GPU; on a CPU float32, with packed weights left as they "
        "are. On a CPU float32 is exact: packed weights are decoded where they are used; bfloat16: native kernels hold weights so and compute in float32",
        choices=(AUTO, "float32", "bfloat16", "float16"),
    )
    max_model_len: int | str = knob(
        AUTO,
        "longest prompt plus output, tokens (8k = 8192); auto: what model and memory allow",
        kind="tokens",
        least=1,
    )
    served_model_name: str = knob("", "name clients use; empty: the model's own")
    seed: int = knob(0, "base of the seeds of offline requests that bring none")
    load_format: str = knob(
        AUTO, "auto: weights from the model; dummy: random weights, for benchmarks", choices=(AUTO, "dummy")
    )
    quantization: str = knob(
        AUTO,
        "how products hold weights. auto: as the checkpoint does, so those of GGUF, AWQ or GPTQ stay packed on a CPU with native kernels (not "
        "with --dtype bfloat16 or float16); none: in --dtype, never packed; fp8 (GPU): in 8 bits, with inputs rounded too, embedding and "
        "head as they are; int8, int4 (CPU): rounded to 8 bits in groups of 32, or to 4 bits with a minimum for each group",
        choices=(AUTO, "none", "fp8", "int8", "int4"),
    )
    attention_backend: str = knob(
        AUTO, "what computes attention", choices=(AUTO, "triton", "flashinfer", "native_cpu", "torch_cpu", "reference")
    )
    deterministic: bool = knob(
        False,
        "the same request gives the same bytes whatever else runs, on a GPU too, at a cost that is printed; a CPU does so always",
    )
    enforce_eager: bool = knob(False, "launch every kernel by itself: no CUDA graphs")
    chat_template: str = knob("", "file with a Jinja chat template that replaces the model's own")
    device: str = knob(AUTO, "where to compute", choices=(AUTO, "cpu", "cuda"))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    page_size: int = knob(16, "tokens in a KV page", flag="block-size", least=1)
    kv_cache_memory_bytes: int | str = knob(
        AUTO, "size of the KV store (2G, 512M, bytes); auto: measured", kind="bytes", least=1
    )
    kv_cache_dtype: str = knob(
        AUTO,
        "what KV pages hold; auto: the model's type, or float16 where native CPU kernels multiply by packed weights; fp8: half of "
        "16-bit pages (GPU); float32, float16, int8 (about a quarter of float32's bytes): on a CPU with native kernels",
        choices=(AUTO, "fp8", "float32", "float16", "int8"),
    )
    gpu_memory_utilization: float = knob(
        0.92,
        "share of the GPU's memory for weights, KV pages and working space when the KV size is auto",
        above=0,
        most=1,
    )
    swap_space: float = knob(
        0.0,
        "GiB of host memory to which preempted requests are swapped; 0: they are computed again",
        least=0,
        most=MAX_GIB,
    )
    enable_prefix_caching: bool = knob(True, "share the pages of equal prompt prefixes")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int | str = knob(AUTO, "rows: sequences that run at once", kind="tokens", least=1)
    max_num_batched_tokens: int | str = knob(
        AUTO, "tokens computed in one step, prefill chunks and decodes together", kind="tokens", least=1
    )
    max_waiting_requests: int = knob(
        4096, "requests that may wait for a row; more are refused with 429; 0: any number", least=0
    )
    max_waiting_tokens: int = knob(
        2**23, "prompt tokens that may wait, of all requests together; 0: any number", least=0
    )
    scheduling_policy: str = knob(
        "fcfs",
        "who is next. fcfs: strictly in the order of arrival; priority: requests with a lower `priority` first, in the order of "
        "arrival among equals; when pages run out, who would go last leaves first",
        choices=("fcfs", "priority"),
    )


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    tensor_parallel_size: int = knob(1, "ranks that share every layer", flag="tensor-parallel-size,tp", least=1)
    cpu_threads: int | str = knob(
        AUTO, "compute threads per rank on the CPU; auto: the cores, shared by the ranks", kind="tokens", least=1
    )
    # Off by default: measured, it gains nothing when the server's own processes share the cores (benchmarks/cpu.md).
    cpu_pinning: bool = knob(False, "bind every compute thread but a rank's first to one core, rank by rank")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = knob("127.0.0.1", "address to listen on")
    port: int = knob(8000, "port to listen on; 0: any free one", least=0, most=65535)
    api_key: str = knob(
        "",
        "key that clients must send as 'Authorization: Bearer KEY', browsers as a password; several: give the flag again, or "
        "separate by commas; also OCTAVO_API_KEY or VLLM_API_KEY",
        kind="list",
    )
    api_key_file: str = knob(
        "", "file with a key in each line, besides --api-key; empty lines and those that begin with # are passed over"
    )
    api_processes: int | str = knob(
        AUTO,
        "processes that parse, tokenize and stream; auto: one for each four cores, at most 8",
        flag="api-processes,api-server-count",
        kind="tokens",
        least=1,
    )
    max_body_bytes: int | str = knob(32 * 2**20, "largest request body", kind="bytes")
    max_schema_bytes: int | str = knob(
        256 * 2**10, "largest JSON schema, grammar or regex that says what an answer must look like", kind="bytes"
    )
    max_messages: int = knob(10_000, "most messages of one chat request", least=1)
    max_n: int = knob(128, "most choices (n) of one request", least=1)
    max_logprobs: int = knob(
        MAX_LOGPROBS,
        f"most of the likeliest tokens whose logprobs one request may ask for, at most {MAX_LOGPROBS}",
        least=0,
        most=MAX_LOGPROBS,
    )
    max_stored_responses: int = knob(
        1000, "responses that each API process keeps for previous_response_id, the latest used ones; 0: none", least=0
    )
    max_stored_response_bytes: int | str = knob(64 * 2**20, "most memory for those", kind="bytes")
    strict_fields: bool = knob(
        False,
        "refuse requests with a field that is unknown or without effect; off: such fields are named back in ignored_fields",
    )
    stream_interval: int = knob(
        1, "tokens in one event of a stream, the first one's aside, where a request does not say", least=1
    )
    sse_keep_alive_interval: float = seconds(
        0.0, "after which a stream that has nothing to say sends a comment, so that proxies keep it; 0: never"
    )
    resume_seconds: float = seconds(
        60.0,
        "for which a stream whose request set stream_options.resumable goes on, and can be read on, without its "
        "client; 0: no stream can be resumed",
    )
    resume_bytes: int | str = knob(
        64 * 2**20,
        "bytes of such streams that each API process keeps, beyond which it drops the longest abandoned",
        kind="bytes",
    )
    allowed_origins: str = knob(
        "",
        'origins a browser may call from (CORS), separated by commas or as JSON (["https://a.example"]); *: any',
        kind="list",
    )
    allowed_methods: str = knob("*", "methods that those origins may use, written alike", kind="list")
    allowed_headers: str = knob("*", "headers that those origins may send, written alike", kind="list")
    allow_credentials: bool = knob(False, "let browsers send cookies and the like from those origins")
    ssl_keyfile: str = knob("", "TLS: the private key, a PEM file")
    ssl_certfile: str = knob(
        "", "TLS: the certificate and its chain, a PEM file; without it the server speaks plain HTTP"
    )
    ssl_ca_certs: str = knob(
        "", "TLS: the authorities whose certificates clients must show, a PEM file; empty: none is asked for"
    )
    tool_call_parser: str = knob(
        AUTO,
        "format of the model's tool calls (hermes, llama3_json, mistral, pythonic, deepseek_v3, qwen3_coder, plain_json); auto: "
        "what its chat template shows, or, where that has no place for tools, hermes asked for in words; none: calls stay text",
    )
    reasoning_parser: str = knob(
        AUTO,
        "format of the model's reasoning (qwen3, deepseek_r1, mistral); auto: what its chat template shows; none: it stays "
        "part of the answer",
    )
    enable_auto_tool_choice: bool = knob(
        True, "let requests leave it to the model whether to call a tool (tool_choice auto)"
    )
    trust_request_chat_template: bool = knob(
        False, "let a request bring its own chat_template, which runs in the same sandbox as the model's"
    )
    root_path: str = knob("", "path prefix under which a proxy serves this server")
    uvicorn_log_level: str = knob(
        "warning", "log level of the HTTP server", choices=("critical", "error", "warning", "info", "debug")
    )
    enable_log_requests: bool = knob(
        False, "log every request in one line: its tokens, times, end and waits; never its text"
    )
    log_format: str = knob("text", "lines of the log: for people, or one JSON object each", choices=("text", "json"))
    log_prompts: bool = knob(False, "show prompts in the lines of --enable-log-requests")
    max_log_len: int = knob(1000, "characters of a prompt that --log-prompts shows", least=1)
    otlp_traces_endpoint: str = knob(
        "", "URL to which every request is sent as OpenTelemetry spans (OTLP over HTTP); needs octavo[otel]"
    )
    journey_bytes: int | str = knob(
        16 * 2**20, "memory of each process for the last requests' journeys (GET /v1/requests/ID)", kind="bytes"
    )
    shutdown_timeout: float = seconds(30.0, "that running requests get to finish after SIGTERM")
    step_timeout: float = seconds(
        300.0,
        "after which an engine whose step does not end is killed, and another goes on with its requests; a tenth of "
        "that where nothing is computed; 0: never",
    )
    slow_step_seconds: float = seconds(
        10.0,
        "after which /health answers 503 while a step takes more than ten times as long as usual; it goes on. Six times as "
        "many for a step of a size that is new to the engine; 0: never",
    )
    start_timeout: float = seconds(
        1800.0,
        "an engine, then an API process, gets to start; if the first ones take longer the server ends; 0: any time",
    )
    max_engine_restarts: int = knob(
        100,
        "times in ten minutes that a new engine takes over from one that has ended, or an API process from another, before the "
        "server gives up",
        least=0,
    )

    @property
    def api_keys(self) -> list[str]:
        """The accepted API keys. Empty: no key is required."""
        return split_list(self.api_key)

    def num_api_processes(self, num_cores: int) -> int:
        # Three of four cores are left to the engine and to other work. With more than eight API processes, the engine would
        # spend more time on sending each of them its tokens than they could save.
        return or_else(self.api_processes, max(1, min(num_cores // 4, MAX_AUTO_API_PROCESSES)))


@dataclass(frozen=True, slots=True)
class BatchConfig:
    files_folder: str = knob(
        "", "folder that keeps /v1/files and /v1/batches over restarts; empty: a temporary one, removed at the end"
    )
    max_file_bytes: int | str = knob(200 * 2**20, "largest file that may be uploaded", kind="bytes", least=1)
    max_files_bytes: int | str = knob(
        2 * 2**30, "bytes of all files together, batches' outputs included", kind="bytes", least=1
    )
    max_files: int = knob(1000, "most files kept at once", least=1)
    batch_concurrency: int | str = knob(
        AUTO, "requests of all batches that run at once; auto: a quarter of --max-num-seqs", kind="tokens", least=1
    )

    @property
    def file_limit(self) -> int:
        return int(self.max_file_bytes)


@dataclass(frozen=True, slots=True)
class RecorderConfig:
    record_bytes: int | str = knob(
        64 * 2**20, "most to keep on disk of what was scheduled, for octavo replay; 0: nothing", kind="bytes", least=0
    )
    record_folder: str = knob(
        "", "where; empty: recordings/ in the cache folder, where nothing of a server that stops in order stays"
    )
    record_tokens: bool = knob(
        False, "record token ids and all wishes, so that the model can compute them again; off: nothing of any text"
    )


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    batches: BatchConfig = field(default_factory=BatchConfig)
    recorder: RecorderConfig = field(default_factory=RecorderConfig)

    def __post_init__(self) -> None:
        """Check everything that can be checked without a model or a machine."""
        for section, cls in sections():
            for option in dataclasses.fields(cls):
                _check_value(option, getattr(getattr(self, section), option.name))
        self._check_door()

    def _check_door(self) -> None:
        """Reject incomplete security settings: starting an open server instead would be the opposite of what was wanted."""
        server = self.server
        if server.api_key and not server.api_keys:
            raise ConfigError(
                f"--api-key (or OCTAVO_API_KEY) {server.api_key!r} holds no key: give one, or leave it out"
            )
        for name, value in (("--ssl-keyfile", server.ssl_keyfile), ("--ssl-ca-certs", server.ssl_ca_certs)):
            if value and not server.ssl_certfile:
                raise ConfigError(f"{name} is for TLS: give --ssl-certfile as well")
        if server.allow_credentials and "*" in split_list(server.allowed_origins):
            raise ConfigError(
                "--allow-credentials with --allowed-origins * would let any web page act for its visitors: name the origins"
            )


def _check_value(option: "dataclasses.Field[Any]", value: Any) -> None:
    """Check one option. argparse has checked flags already, but not the options of the Python `LLM`."""
    flag = "--" + (option.metadata["flag"].split(",")[0] or option.name.replace("_", "-"))
    choices, (above, least, most) = option.metadata["choices"], option.metadata["within"]
    if choices and value not in choices:
        raise ConfigError(f"{flag} must be one of {', '.join(choices)}, got {value!r}")
    if (above, least, most) == (None, None, None) or (value == AUTO and option.default == AUTO):
        return
    is_number = isinstance(value, int | float)
    is_low_enough = is_number and (most is None or value <= most)
    is_high_enough = is_number and (least is None or value >= least) and (above is None or value > above)
    if not (is_low_enough and is_high_enough):
        raise ConfigError(f"{flag} must be {_in_words(above, least, most)}, got {value}")


def _in_words(above: float | None, least: float | None, most: float | None) -> str:
    if above is None and least is not None and most is not None:
        return f"between {least} and {most}"
    parts = ((above, "above"), (least, "at least"), (most, "at most"))
    return " and ".join(f"{word} {number}" for number, word in parts if number is not None)


def split_list(text: str) -> list[str]:
    """Split the text of a `list` knob at its commas."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def or_else(value: int | str, otherwise: int) -> int:
    """Return `value`, or `otherwise` if it is `auto`."""
    return value if isinstance(value, int) else otherwise


def sections() -> list[tuple[str, type[Any]]]:
    """Return (field of Config, dataclass) for every subsystem. cli/flags.py generates the flags from it."""
    return [(f.name, f.default_factory) for f in dataclasses.fields(Config)]  # type: ignore[misc]


def field_names(section: str) -> dict[str, str]:
    """Map every Python name of a section's fields, including names that only the flag has (block_size), to the field."""
    names: dict[str, str] = {}
    for f in dataclasses.fields(dict(sections())[section]):
        for flag in (f.metadata["flag"] or f.name).split(","):
            names[flag.replace("-", "_")] = f.name
        names[f.name] = f.name
    return names


def replace(config: Config, **values: Any) -> Config:
    """Return a copy with fields changed by name, in whichever section they are. An unknown name raises ConfigError."""
    changed: dict[str, Any] = {}
    for section, _ in sections():
        names = field_names(section)
        mine = {names[name]: values.pop(name) for name in list(values) if name in names}
        if mine:
            changed[section] = dataclasses.replace(getattr(config, section), **mine)
    if values:
        known = sorted(name for section, _ in sections() for name in field_names(section).values())
        raise ConfigError(f"unknown option {sorted(values)[0]!r}; the options are {', '.join(dict.fromkeys(known))}")
    return dataclasses.replace(config, **changed)
