"""The configuration: one frozen dataclass per subsystem. Every field is a command-line flag, with its default and help text;
commands add a few of their own (cli/main.py). limits.py resolves most `auto`s that need no measurement."""

import dataclasses
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo.errors import ConfigError

AUTO = "auto"
# Far beyond any real use. An upper bound rejects infinity, and values that would overflow later, at start-up.
MAX_GIB = 2**30
MAX_SECONDS = 10**9
MAX_AUTO_API_PROCESSES = 8
MAX_REPLICAS = 64
MAX_ADAPTER_NAME = 200  # characters
KEY_VARIABLES = (
    "OCTAVO_API_KEY",
    "VLLM_API_KEY",
    "OCTAVO_ADMIN_KEY",
    "OCTAVO_METRICS_KEY",
)  # of the environment, with API keys
MAX_JSON_DEPTH = 190  # the decoder's own limit is 200
AUTO_TEXT_LEN, AUTO_TEXT_LEN_PER_TOKEN = 2 * 2**20, 16  # characters; ordinary text has about four for each token
MAX_LOGPROBS = 20  # upper bound on the top logprobs per position that a request may ask for
# The attention backends, in order of preference; the last one runs everywhere. octavo/attention/<name>.py has the class; it is
# imported only if its package is installed and the device matches. name → (package, device; "": any)
ATTENTION_BACKENDS = {
    "triton": ("triton", "cuda"),
    "flashinfer": ("flashinfer", "cuda"),
    "native_cpu": ("torch", "cpu"),
    "torch_cpu": ("torch", "cpu"),
    "reference": ("torch", ""),
}


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
    is_secret: bool = False,
    status: int = 400,
) -> Any:
    """Define a field that is also a flag. `flag`: the flag's names if they differ from the field's; `kind`: how to parse its text;
    `is_secret`: not in the section's repr(); `status`: of the answer to a request beyond a limit, for the table of budgets.
    `above` (exclusive), `least` and `most` (inclusive): bounds of a number; a field whose default is `auto` also accepts `auto`."""
    within = (above, least, most)
    metadata = {"help": help, "choices": choices, "flag": flag, "kind": kind, "within": within, "status": status}
    return field(default=default, metadata=metadata, repr=not is_secret)


def seconds(default: float, help: str) -> Any:
    """Define a field that holds a number of seconds, 0 included."""
    return knob(default, "seconds " + help, least=0, most=MAX_SECONDS)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model: str = knob(
        "", "model to load: a folder, a .gguf file or a hub id; empty: the embedded SmolLM2-135M-Instruct", flag="MODEL"
    )
    tokenizer: str = knob("", "folder or file to load the tokenizer from; empty: the model's own")
    revision: str = knob("", "revision to download from the hub; empty: main")
    dtype: str = knob(
        AUTO,
        "type of the weights and of the arithmetic. auto: on a GPU the checkpoint's type; on a CPU float32, and packed weights "
        "stay packed. float32 is exact on a CPU: packed weights stay packed, and are decoded to float32 while they are "
        "multiplied. bfloat16 on a CPU: native kernels hold the weights in bfloat16 and compute in float32",
        choices=(AUTO, "float32", "bfloat16", "float16"),
    )
    max_model_len: int | str = knob(
        AUTO,
        "most tokens of a prompt and its output together (8k = 8192); auto: as many as the model and the memory allow",
        kind="tokens",
        least=1,
    )
    served_model_name: str = knob(
        "",
        "names that clients may use for the model in requests: several after the flag, or separated by commas; answers have the first; "
        "empty: the model's own name",
        kind="names",
    )
    download_dir: str = knob("", "folder for models from the hub; empty: the hub's own cache (HF_HUB_CACHE)")
    hf_overrides: str = knob(
        "",
        "JSON object that replaces values of the model's config.json, for example "
        '\'{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}\'',
        kind="json",
    )
    generation_config: str = knob(
        AUTO,
        "where the default sampling parameters come from. auto: the model's generation_config.json; vllm: neutral values (temperature "
        "1), whatever the model says; otherwise a folder with another generation_config.json",
    )
    override_generation_config: str = knob(
        "",
        "JSON object of default sampling parameters that replace those of --generation-config: '{\"temperature\": 0.5}'",
        kind="json",
    )
    seed: int = knob(0, "base seed for offline requests that do not set a seed")
    load_format: str = knob(
        AUTO,
        "auto: load the model's weights; dummy: random weights, for benchmarks; the folder may then hold only a config.json, "
        "and octavo serve makes a tokenizer up",
        choices=(AUTO, "dummy"),
    )
    quantization: str = knob(
        AUTO,
        "how the weights of matrix products are stored. auto: as in the checkpoint; GGUF, AWQ and GPTQ weights stay packed on a "
        "CPU with native kernels (not with --dtype bfloat16 or float16); on a GPU 4-bit groups and MXFP4 experts do, and other packed weights "
        "where all weights would take more than half of its memory as 16 bits, because their kernels are slower for many rows. packed: those stay "
        "packed, too. none: in --dtype, never packed. fp8 (GPU): in 8 bits; "
        "activations are rounded to 8 bits too, embedding and head are not. int8: rounded to 8 bits in groups of "
        "32. int4: to 4 bits in groups of 32, with a minimum for each; on a GPU embedding, head and experts are not",
        choices=(AUTO, "packed", "none", "fp8", "int8", "int4"),
    )
    attention_backend: str = knob(
        AUTO,
        "implementation of attention; auto: the best one for the device",
        choices=(AUTO, *ATTENTION_BACKENDS),
    )
    deterministic: bool = knob(
        False,
        "make a GPU give the same bytes for the same request, whatever else is in the batch; the cost is printed at start-up. "
        "A CPU always does",
    )
    enforce_eager: bool = knob(False, "do not use CUDA graphs: launch every kernel separately")
    chat_template: str = knob("", "file with a Jinja chat template that replaces the model's own")
    default_chat_template_kwargs: str = knob(
        "",
        "JSON object of variables for the chat template, for requests that do not set them in chat_template_kwargs: "
        "'{\"enable_thinking\": false}'",
        kind="json",
    )
    device: str = knob(AUTO, "device to compute on; auto: a GPU if there is one", choices=(AUTO, "cpu", "cuda"))

    @property
    def served_names(self) -> list[str]:
        """The names of --served-model-name. Empty: the model's own name."""
        return list(dict.fromkeys(split_list(self.served_model_name)))

    def name_of(self, own_name: str) -> str:
        """The name in answers. `own_name`: the model's."""
        return self.served_names[0] if self.served_names else own_name


@dataclass(frozen=True, slots=True)
class CacheConfig:
    page_size: int = knob(16, "tokens per KV page", flag="block-size", least=1)
    kv_cache_memory_bytes: int | str = knob(
        AUTO,
        "memory for KV pages (2G, 512M, or bytes); auto: measured after the model is loaded",
        kind="bytes",
        least=1,
    )
    kv_cache_dtype: str = knob(
        AUTO,
        "element type of KV pages. auto: the model's type, or float16 if native CPU kernels multiply by packed weights. fp8: half "
        "the size of 16-bit pages (GPU only). float32, float16, int8 (about a quarter of float32's size): CPU with native "
        "kernels only",
        choices=(AUTO, "fp8", "float32", "float16", "int8"),
    )
    gpu_memory_utilization: float = knob(
        0.92,
        "share of the GPU's memory to use for weights, KV pages and working memory, if --kv-cache-memory-bytes is auto",
        above=0,
        most=1,
    )
    memory_share: float = knob(
        1.0,
        "share of the memory that KV pages take by default: less where other servers use the same machine or GPU. With several models, each "
        "has its part of it",
        above=0,
        most=1,
    )
    swap_space: float = knob(
        0.0,
        "GiB of host memory for the KV pages of preempted requests; 0: preempted requests are recomputed",
        least=0,
        most=MAX_GIB,
    )
    enable_prefix_caching: bool = knob(True, "reuse the KV pages of prompt prefixes that were computed before")
    kv_tier: str = knob(
        "",
        "where prefixes outlive the KV store; two tiers are given by two flags. ram:8GiB keeps KV pages that a GPU needs for others in pinned "
        "memory of the host. disk:50GiB:/path keeps KV pages in a folder of this user alone, within so many bytes, and they outlive the "
        "server. Pages of a prompt that was computed before come from there if that is faster than computing them. On a Ray cluster every "
        "node has its own folder of this path. Needs one rank and a model without sliding windows",
        kind="list",
    )
    prefix_eviction: str = knob(
        "adaptive",
        "which idle prefixes are evicted first when pages run out. adaptive: the least recently used, where the latest come again; where "
        "others do, those that were found least often and cost least to compute. lru: the least recently used, always",
        choices=("adaptive", "lru"),
    )
    idle_prefix_bytes: int | str = knob(
        AUTO,
        "most memory that prefixes keep which no request uses, on a CPU, where a page takes memory when it is first used (192M: frugal); "
        "auto: the whole KV store, and less while memory is scarce",
        kind="bytes",
        least=0,
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int | str = knob(AUTO, "rows: most sequences that run at the same time", kind="tokens", least=1)
    max_num_batched_tokens: int | str = knob(
        AUTO, "most tokens that one step computes, prefill chunks and decodes together", kind="tokens", least=1
    )
    max_inter_token_ms: float | str = knob(
        AUTO,
        "most milliseconds that a step should take while streams are running, so that prompts do not keep their tokens waiting: a "
        "step computes only as much of prompts as fits, by the measured costs of steps. auto: 2.75 times as long as a step without "
        "prompts, and at least 60 ms or 8 times a step's fixed cost; off, or 0: no limit. Without a server, auto is off",
        kind="ms",
        least=0,
        most=MAX_SECONDS,
    )
    speculative_config: str = knob(
        "",
        "JSON object: draft tokens ahead and verify them in one step, which changes no token. method: auto, ngram (the last place with the "
        "same tokens), suffix (the place with the longest match), draft_model (a smaller model of the same vocabulary, named by model), "
        "eagle3 (an EAGLE-3 head, named by model), mtp (the model's own layers for multi-token prediction; the last "
        "three work with one GPU, or with any number of ranks on a CPU) or none; num_speculative_tokens: most drafted tokens of a row in a step "
        "(8); prompt_lookup_min, prompt_lookup_max: tokens that ngram looks for (2, 4); suffix_decoding_max_cached_requests: "
        "suffix also drafts from the outputs of the last N requests of the same API key and cache_salt (0: from none); grammar: false "
        "does not draft what a grammar forces; adaptive: false drafts whatever it costs. "
        "auto: ngram on a CPU with native kernels, where drafts are as long as their measured cost is worth; else none",
        kind="json",
    )
    max_waiting_requests: int = knob(
        4096, "most requests in the queue; further requests get status 429; 0: no limit", least=0
    )
    max_waiting_tokens: int = knob(
        2**23, "most prompt tokens of all requests in the queue; further requests get status 429; 0: no limit", least=0
    )
    scheduling_policy: str = knob(
        "fcfs",
        "order of the queue. fcfs: order of arrival; priority: lowest `priority` first, equal ones in order of arrival. Of a request "
        "with several sequences, one at a time has a place in this order, and the others come after all requests. When pages run out, "
        "the sequence that is last is preempted first",
        choices=("fcfs", "priority"),
    )
    fairness: str = knob(
        "none",
        "between whom the engine's work is divided in proportion to weights, while requests wait. none: all are served in order of "
        "arrival; key: API keys, with the weights of --api-key-file; user: values of the field `user`, within each key; header:NAME: "
        "values of an HTTP header, within each key. Requests of one key, user or value are served in order of arrival",
    )
    grammar_step_seconds: float = knob(
        2.0,
        "most seconds of computing for one token of an answer with a grammar, and on average a fortieth of it; beyond that the "
        "request fails",
        above=0,
        most=MAX_SECONDS,
    )


@dataclass(frozen=True, slots=True)
class LoraConfig:
    enable_lora: bool = knob(
        False,
        "serve adapters (LoRA) of the model beside it: a request names one as its model. On a CPU with native kernels, and on a GPU with 16-bit arithmetic",
    )
    lora_modules: str = knob(
        "",
        "adapters that are served from the start, as name=path: several after the flag, or separated by commas. A path is a PEFT folder or "
        "a GGUF file",
        kind="names",
    )
    max_lora_rank: int = knob(256, "highest rank of an adapter", least=1, most=256)
    max_loras: int = knob(
        0, "most adapters that running requests may have at the same time; 0: as many as --lora-memory holds", least=0
    )
    max_cpu_loras: int = knob(
        0,
        "most adapters that are kept in memory; 0: as many as --lora-memory holds. Others are read when they are asked for",
        least=0,
    )
    lora_memory_bytes: int | str = knob(
        AUTO,
        "memory for adapters, beside the KV pages, on all ranks together (2G, 512M, or bytes); auto: a tenth of what is left after the model "
        "is loaded",
        kind="bytes",
        flag="lora-memory",
        least=1,
    )
    lora_folders: str = knob(
        "",
        "folders from which /v1/load_lora_adapter may load adapters: several after the flag, or separated by commas; empty: none",
        kind="names",
    )

    @property
    def modules(self) -> dict[str, str]:
        """Name → path of --lora-modules. Raises ConfigError."""
        found: dict[str, str] = {}
        for entry in split_list(self.lora_modules):
            name, separator, path = entry.partition("=")
            if not (name and separator and path):
                raise ConfigError(f"--lora-modules {entry!r} is not name=path")
            if len(name) > MAX_ADAPTER_NAME:
                raise ConfigError(
                    f"--lora-modules: a name has {len(name)} characters; at most {MAX_ADAPTER_NAME} are allowed"
                )
            if name in found:
                raise ConfigError(f"--lora-modules has the name {name!r} twice: names of adapters differ")
            found[name] = path
        return found

    @property
    def folders(self) -> list[str]:
        return split_list(self.lora_folders)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    tensor_parallel_size: int = knob(
        1, "ranks (GPUs or processes) that split every layer", flag="tensor-parallel-size,tp", least=1
    )
    pipeline_parallel_size: int = knob(
        1,
        "stages that the layers are divided into, each with its own ranks (GPUs or processes)",
        flag="pipeline-parallel-size,pp",
        least=1,
    )
    pipeline_layer_split: str = knob(
        AUTO, "layers of each pipeline stage, such as 14,16; auto: so that the stages take equally long"
    )
    enable_expert_parallel: bool = knob(
        False,
        "divide the experts of a mixture over the ranks of --tensor-parallel-size, instead of splitting each expert",
    )
    cpu_threads: int | str = knob(
        AUTO, "compute threads per rank on a CPU; auto: all cores, divided by the ranks", kind="tokens", least=1
    )
    distributed_executor_backend: str = knob(
        "mp",
        "where replicas and their ranks run. mp, uni: as processes of this machine; ray: on the nodes of a Ray cluster (pip install "
        "octavo[ray])",
        choices=("mp", "uni", "ray"),
    )
    # Off by default: measured, it gains nothing when the server's own processes share the cores (benchmarks/cpu.md).
    cpu_pinning: bool = knob(False, "pin every compute thread, except the first of each rank, to one core")

    @property
    def uses_ray(self) -> bool:
        return self.distributed_executor_backend == "ray"

    @property
    def num_ranks(self) -> int:
        """Of one engine. Rank r is number r % tensor_parallel_size of stage r // tensor_parallel_size."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def result_rank(self) -> int:
        """The rank that returns results: the first of the last stage, whose ranks sample."""
        return self.num_ranks - self.tensor_parallel_size


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Several replicas of one model behind one server. A replica is one engine with its ranks."""

    data_parallel_size: int = knob(
        1,
        "replicas: engines that each hold the whole model and serve a part of the requests; the machine's cores or GPUs are divided "
        "among them",
        flag="data-parallel-size,dp",
        least=1,
        most=MAX_REPLICAS,
    )
    routing_policy: str = knob(
        "prefix",
        "which replica gets a request. prefix: the one that holds its prefix, until it is saturated, then the one with the least work; "
        "least_work: the one with the least work; round_robin: each in turn",
        choices=("prefix", "least_work", "round_robin"),
    )
    saturation_seconds: float = knob(
        2.0,
        "seconds of waiting work from which on a replica is saturated: prefix then prefers others",
        above=0,
        most=MAX_SECONDS,
    )
    replica_timeout: float = seconds(
        3.0,
        "without a sign of life from a replica's process after which its requests go on at others and it is replaced. However long a step "
        "takes, it is not meant: see --step-timeout. 0: never; without other replicas, never",
    )

    min_replicas: int = knob(
        0,
        "fewest replicas, if their number follows the load: the seconds of work that wait, against --saturation-seconds. 0: "
        "--data-parallel-size, or 1 with --max-replicas",
        least=0,
        most=MAX_REPLICAS,
    )
    max_replicas: int = knob(
        0,
        "most replicas, if their number follows the load; 0: it stays as it is, until octavo scale changes it",
        least=0,
        most=MAX_REPLICAS,
    )

    ray_address: str = knob(
        "",
        "HOST:PORT of the Ray cluster's head, with --distributed-executor-backend ray; empty: the cluster of which this machine is a node, "
        "or one that is started here and that other machines join with ray start",
    )

    @property
    def is_fleet(self) -> bool:
        """Whether there are, or may be, several replicas: otherwise no router is in the path."""
        return max(self.data_parallel_size, self.min_replicas, self.max_replicas) > 1

    @property
    def least_replicas(self) -> int:
        return self.min_replicas or 1

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or MAX_REPLICAS

    @property
    def first_replicas(self) -> int:
        """How many are started at first."""
        return max(self.data_parallel_size, self.min_replicas)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = knob("127.0.0.1", "address to listen on")
    port: int = knob(8000, "port to listen on; 0: any free port", least=0, most=65535)
    uds: str = knob("", "path of a UNIX socket to listen on, instead of --host and --port")
    api_key: str = knob(
        "",
        "API key that clients must send as 'Authorization: Bearer KEY', and browsers as the password. For several keys, repeat "
        "the flag or separate them by commas. Other users of the machine can see a command line: prefer --api-key-file, or the "
        "environment: OCTAVO_API_KEY or VLLM_API_KEY",
        kind="list",
        is_secret=True,
    )
    api_key_file: str = knob(
        "",
        "file with one API key per line, in addition to --api-key; a line 'admin: KEY' is an --admin-key; empty lines and lines "
        "that begin with # are ignored. Columns behind a key set its name, weight and limits: KEY name weight rpm tpm "
        "max_tokens_in_flight budget_tokens/day, with - for none, or as words like rpm=60",
    )
    key_settings: str = knob(
        "",
        "JSON object: for each API key an object with name, weight, rpm, tpm, max_tokens_in_flight and budget_tokens, as the columns of "
        "--api-key-file",
        kind="json",
        is_secret=True,
    )
    admin_key: str = knob(
        "",
        "API key that sees the files, batches, requests and responses of all keys; every other key sees its own. For several, "
        "as --api-key. Environment: OCTAVO_ADMIN_KEY",
        kind="list",
        is_secret=True,
    )
    metrics_open: bool = knob(False, "answer GET /metrics without a key, for scrapers that can send none")
    metrics_key: str = knob(
        "",
        "key that may read GET /metrics and nothing else, as 'Authorization: Bearer KEY'; with it, /metrics needs this or an API key "
        "even if nothing else does. For several, as --api-key. Environment: OCTAVO_METRICS_KEY",
        kind="list",
        is_secret=True,
    )
    api_processes: int | str = knob(
        AUTO,
        "processes that parse requests, tokenize and stream; auto: one per four cores, at most 8",
        flag="api-processes,api-server-count",
        kind="tokens",
        least=1,
    )
    max_stored_responses: int = knob(
        1000,
        "responses that each API process keeps for previous_response_id; the least recently used are dropped first; 0: none",
        least=0,
    )
    max_stored_response_bytes: int | str = knob(
        64 * 2**20, "most memory for stored responses in each API process", kind="bytes"
    )
    max_model_store_bytes: int | str = knob(
        64 * 2**30,
        "most bytes of all models in models/ of the cache folder that /api/pull may fill; 0: it pulls none. octavo pull has no limit "
        "but the disk",
        kind="bytes",
        least=0,
    )
    strict_fields: bool = knob(
        False,
        "reject requests with fields that are unknown or have no effect; off: the response lists such fields in ignored_fields",
    )
    drop_client_nonces: bool = knob(
        True,
        "leave out the line x-anthropic-billing-header that Claude Code puts before its system prompt and changes in every request, so that "
        "requests share their prefix; the response names it in ignored_fields. Not with --strict-fields",
    )
    prefix_sharing: str = knob(
        "all",
        "which requests use each other's pages of equal prefixes. all: every one; key: those of the same API key, so that none can tell from "
        "the time of a first token what another has sent. A request with a cache_salt shares with those that have the same",
        choices=("all", "key"),
    )
    stream_interval: int = knob(
        1,
        "tokens in each event of a stream after the first event, which has one token; a request can set its own "
        "stream_interval",
        least=1,
    )
    sse_keep_alive_interval: float = seconds(
        0.0, "without an event after which a stream sends a comment, so that proxies keep it open; 0: never"
    )
    resume_seconds: float = seconds(
        60.0,
        "for which a stream continues without its client and can be resumed, if its request set stream_options.resumable; "
        "0: no stream can be resumed",
    )
    resume_bytes: int | str = knob(
        64 * 2**20,
        "bytes of resumable streams that each API process keeps; beyond that, it drops the stream without a client for longest",
        kind="bytes",
    )
    allowed_hosts: str = knob(
        "",
        "names by which clients may reach this server, besides its IP addresses, localhost and the machine's own names, separated by "
        "commas: llm.example.com, *.example.com, or * for any. Without an API key, requests whose Host is another name get status "
        "403, because a web site could have taken the name to read answers; with a key, any name passes unless this is set",
        kind="list",
    )
    allowed_origins: str = knob(
        "",
        'CORS: origins from which browsers may call, separated by commas or as JSON (["https://a.example"]); *: any',
        kind="list",
    )
    allowed_methods: str = knob("*", "CORS: methods that these origins may use, in the same notation", kind="list")
    allowed_headers: str = knob("*", "CORS: headers that these origins may send, in the same notation", kind="list")
    allow_credentials: bool = knob(False, "CORS: let browsers send cookies and other credentials from these origins")
    ssl_keyfile: str = knob("", "TLS: PEM file with the private key")
    ssl_certfile: str = knob("", "TLS: PEM file with the certificate and its chain; empty: plain HTTP")
    ssl_ca_certs: str = knob(
        "", "TLS: PEM file with the authorities that must have signed clients' certificates; empty: clients need none"
    )
    tool_call_parser: str = knob(
        AUTO,
        "format of the model's tool calls (hermes, llama3_json, mistral, pythonic, deepseek_v3, qwen3_coder, plain_json). auto: "
        "the format in its chat template; if the template does not take tools, they are described in the prompt and called in "
        "hermes format. none: calls stay in the text",
    )
    reasoning_parser: str = knob(
        AUTO,
        "format of the model's reasoning (qwen3, deepseek_r1, mistral). auto: the format in its chat template. none: reasoning "
        "stays in the text",
    )
    enable_auto_tool_choice: bool = knob(
        True, "let requests leave the decision to call a tool to the model (tool_choice auto)"
    )
    trust_request_chat_template: bool = knob(
        False, "allow requests with their own chat_template; it runs in the same sandbox as the model's"
    )
    root_path: str = knob("", "path prefix under which a reverse proxy serves this server")
    uvicorn_log_level: str = knob(
        "warning", "log level of the HTTP server", choices=("critical", "error", "warning", "info", "debug")
    )
    enable_log_requests: bool = knob(
        False, "log one line per request: tokens, times, waits and how it ended; never its text"
    )
    log_format: str = knob(
        "text", "format of log lines: text for people, or one JSON object per line", choices=("text", "json")
    )
    log_prompts: bool = knob(False, "include prompts in the lines of --enable-log-requests")
    max_log_len: int = knob(1000, "most characters of a prompt in a log line of --log-prompts", least=1)
    otlp_traces_endpoint: str = knob(
        "", "URL that receives every request as OpenTelemetry spans (OTLP over HTTP); needs octavo[otel]"
    )
    journey_bytes: int | str = knob(
        16 * 2**20,
        "memory for the journeys of recent requests (GET /v1/requests/ID): so much in the engine, and as much shared by the API processes",
        kind="bytes",
    )
    shutdown_timeout: float = seconds(30.0, "that running requests have to finish after SIGTERM")
    step_timeout: float = seconds(
        300.0,
        "after which an engine is killed if its step does not end; a new engine continues its requests. A tenth of that if the "
        "engine uses no processor time; 0: never",
    )
    slow_step_seconds: float = seconds(
        10.0,
        "after which /health returns 503 if the current step also takes more than ten times as long as usual; the step "
        "continues. Six times as long for a step of a size that is new to the engine; 0: never",
    )
    start_timeout: float = seconds(
        1800.0,
        "that an engine, and then an API process, has to start; if the first ones take longer, the server exits; 0: no limit",
    )
    max_engine_restarts: int = knob(
        100,
        "most restarts of the engine, or of an API process, within ten minutes; after that the server exits",
        least=0,
    )

    @property
    def api_keys(self) -> list[str]:
        """The accepted API keys, admin keys included. Empty: no key is required."""
        return list(dict.fromkeys([*split_list(self.api_key), *self.admin_keys]))

    @property
    def admin_keys(self) -> list[str]:
        """The keys that see what belongs to other keys, too."""
        return split_list(self.admin_key)

    @property
    def metrics_keys(self) -> list[str]:
        """The keys for /metrics alone."""
        return split_list(self.metrics_key)

    def num_api_processes(self, num_cores: int) -> int:
        # Three of four cores are left to the engine and to other work. With more than eight API processes, the engine would
        # spend more time on sending each of them its tokens than they could save.
        return or_else(self.api_processes, max(1, min(num_cores // 4, MAX_AUTO_API_PROCESSES)))


@dataclass(frozen=True, slots=True)
class BudgetConfig:
    """What one request may take. Every limit on something that a client can size, nest or repeat is here, is checked before the
    work is done, and is named in the error. docs/reference/budgets.md has the table, with
    the limits that are constants."""

    max_body_bytes: int | str = knob(32 * 2**20, "largest request body", kind="bytes", status=413)
    max_bodies_bytes: int | str = knob(
        256 * 2**20,
        "most bytes of all request bodies together that one API process holds before their responses begin; beyond it, a body over "
        "64 KiB gets status 429. Uploaded files do not count: they go to the disk",
        kind="bytes",
        least=2**20,
        status=429,
    )
    max_schema_bytes: int | str = knob(
        256 * 2**10, "largest JSON schema, grammar or regex for structured outputs", kind="bytes"
    )
    max_messages: int = knob(10_000, "most messages in one chat request", least=1)
    max_prefix_retention: float = seconds(
        3600.0,
        "for which the pages of a conversation are kept after its last turn at most, where a request asks for it (prompt_cache_key, "
        "prompt_cache_retention, cache_control); a longer time is shortened to this; 0: never",
    )
    max_pinned_bytes: int | str = knob(
        AUTO,
        "most bytes of KV pages that one API key pins with POST /v1/prefix; auto: an eighth of the KV store; 0: none",
        kind="bytes",
        least=0,
    )
    max_n: int = knob(128, "most choices (n) of one request", least=1)
    max_logprobs: int = knob(
        MAX_LOGPROBS,
        f"most top logprobs per token that a request may ask for, up to {MAX_LOGPROBS}",
        least=0,
        most=MAX_LOGPROBS,
    )
    max_head_bytes: int | str = knob(
        64 * 2**10,
        "largest head of a request (request line and headers), and most bytes around the chunks of its body: sizes, extensions, "
        "trailers; beyond it, status 431",
        kind="bytes",
        least=1024,
        status=431,
    )
    max_headers: int = knob(
        100, "most headers, and most trailers, of a request; beyond it, status 431", least=16, most=10_000, status=431
    )
    max_json_items: int | str = knob(
        1_000_000,
        "most values in the JSON of one request, at any depth: a number in a list counts for 1, a string or a list for 3, a member of "
        "an object for 8 and its value",
        kind="tokens",
        least=1,
        status=413,
    )
    max_json_depth: int = knob(
        128,
        f"most levels of nested lists and objects in the JSON of one request, up to {MAX_JSON_DEPTH}",
        least=1,
        most=MAX_JSON_DEPTH,
    )
    max_text_len: int | str = knob(
        AUTO,
        "most characters of text that one request may have tokenized: all prompts, inputs or messages together; auto: "
        f"{AUTO_TEXT_LEN}, or {AUTO_TEXT_LEN_PER_TOKEN} for each token of the context if that is more",
        kind="tokens",
        least=1,
    )
    max_tools: int = knob(1024, "most tools in one request", least=1)
    grammar_seconds: float = knob(
        5.0,
        "most seconds of computing to check one schema, grammar or regex, or to compile or render a request's chat template",
        above=0,
        most=MAX_SECONDS,
    )
    grammar_memory_bytes: int | str = knob(
        192 * 2**20, "most memory for the same", kind="bytes", flag="grammar-memory", least=2**20
    )
    compiled_grammar_bytes: int | str = knob(
        2 * 2**30,
        "memory that the compiled grammars of open requests may take together in the engine, on each rank, before requests with "
        "other grammars wait; a sixteenth of it is for grammars that no request uses at the moment",
        kind="bytes",
        flag="compiled-grammar-memory",
        least=2**20,
    )
    grammar_processes: int = knob(
        2, "processes of each API process that do the same, started with the first grammar", least=1, most=64
    )
    max_waiting_grammars: int = knob(
        256,
        "most grammars and templates of one API process that wait for these processes; more are refused",
        least=1,
        status=429,
    )
    max_request_sequences: int = knob(
        4096, "most sequences of one request: its prompts or inputs, times n or best_of", least=1
    )
    max_request_tokens: int = knob(
        2**25,
        "most tokens that one request may take: the tokens of its prompts and max_tokens, over all its sequences; 0: no limit",
        least=0,
    )

    def text_len(self, max_model_len: int) -> int:
        """The most characters of text in one request, for a model with this context."""
        return or_else(self.max_text_len, max(AUTO_TEXT_LEN, AUTO_TEXT_LEN_PER_TOKEN * max_model_len))


@dataclass(frozen=True, slots=True)
class BatchConfig:
    files_folder: str = knob(
        "",
        "folder for /v1/files and /v1/batches, which are kept across restarts; empty: a temporary folder, removed at exit",
    )
    files_part: str = knob(
        "",
        "name of this server's part of --files-folder, where several servers share the folder: files and what keys have used are common to "
        "all of them, batches are each server's own. Empty: no other server uses the folder",
    )
    max_file_bytes: int | str = knob(200 * 2**20, "largest file that may be uploaded", kind="bytes", least=1)
    max_files_bytes: int | str = knob(
        2 * 2**30, "most bytes of all files together, including the outputs of batches", kind="bytes", least=1
    )
    max_files: int = knob(1000, "most files that are kept at the same time", least=1)
    batch_concurrency: int | str = knob(
        AUTO,
        "most batch requests that run at the same time, over all batches; auto: a quarter of --max-num-seqs",
        kind="tokens",
        least=1,
    )

    @property
    def file_limit(self) -> int:
        return int(self.max_file_bytes)

    @property
    def own_folder(self) -> str:
        """For what servers that share --files-folder do not share."""
        return f"{self.files_folder}/part-{self.files_part}" if self.files_part else self.files_folder


@dataclass(frozen=True, slots=True)
class RecorderConfig:
    record_bytes: int | str = knob(
        64 * 2**20,
        "most disk space for the recording of the schedule, for octavo replay; 0: no recording",
        kind="bytes",
        least=0,
    )
    record_folder: str = knob(
        "",
        "folder of the recordings; empty: recordings/ in the cache folder, from which a server that stops normally removes its own",
    )
    record_tokens: bool = knob(
        False,
        "record token ids and sampling parameters too, so that octavo replay can recompute the tokens; off: the recording holds "
        "nothing of any text",
    )


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    """Several models on one port (decision 056)."""

    models: str = knob(
        "",
        "models to serve on one port, as NAME=MODEL or MODEL, separated by commas; the same as several MODELs on the command line. Requests "
        "choose by `model`; without it they mean the first",
        kind="list",
    )
    model_settings: str = knob(
        "",
        'JSON object: for the name of a model an object of flags that only its server has: \'{"b": {"max_model_len": 4096}}\'',
        kind="json",
    )
    max_loaded_models: int = knob(
        0,
        "most models in memory at once; the first so many are loaded at the start. A model that is asked for has another one leave, which "
        "finishes its responses first. 0: all of them",
        least=0,
    )
    keep_loaded: str = knob(
        "",
        "names of models that are loaded at the start and stay: they do not leave for others, nor because they are idle. For several, repeat the "
        "flag or separate them by commas",
        kind="list",
    )
    load_on_demand: bool = knob(False, "load each model when a request asks for it, none at the start")
    model_idle_seconds: float = seconds(0.0, "without a request after which a model is unloaded; 0: never")
    model_sleep_level: int = knob(
        2,
        "what a model that leaves for another one, or is idle, gives back: 2 everything; 1 all but the weights, which stay in host memory, so that "
        "it is back sooner. Its processes stay, too",
        least=1,
        most=2,
    )
    model_min_seconds: float = seconds(
        10.0, "for which a model stays loaded at least, so that models do not take turns all the time"
    )

    @property
    def are_several(self) -> bool:
        return bool(self.models)


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    batches: BatchConfig = field(default_factory=BatchConfig)
    recorder: RecorderConfig = field(default_factory=RecorderConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)

    def __post_init__(self) -> None:
        """Check everything that can be checked without a model or a machine."""
        for section, cls in sections():
            for option in dataclasses.fields(cls):
                _check_value(option, getattr(getattr(self, section), option.name))
        for name in ("hf_overrides", "override_generation_config", "default_chat_template_kwargs"):
            read_json_object(getattr(self.model, name), "--" + name.replace("_", "-"))
        read_json_object(self.scheduler.speculative_config, "--speculative-config")
        read_json_object(self.models.model_settings, "--model-settings")
        self._check_models()
        self._check_part()
        read_tiers(self.cache.kv_tier)
        self._check_access()
        self._check_fairness()
        self._check_fleet()
        self._check_lora()

    def _check_models(self) -> None:
        models = self.models
        given = (
            ("--model-settings", models.model_settings),
            ("--max-loaded-models", models.max_loaded_models),
            ("--model-idle-seconds", models.model_idle_seconds),
            ("--model-sleep-level", models.model_sleep_level != 2),
            ("--keep-loaded", models.keep_loaded),
        )
        for flag, value in given:
            if value and not models.are_several:
                raise ConfigError(f"{flag} is for several models: name them with --models, or leave it out")
        if models.are_several and self.model.model:
            raise ConfigError(f"--model {self.model.model} beside --models: put it into --models")

    def _check_part(self) -> None:
        part = self.batches.files_part
        if part and not re.fullmatch(r"[\w-][\w.-]{0,99}", part, re.ASCII):
            raise ConfigError(
                f"--files-part {part[:120]!r} must have 1 to 100 letters, digits, _, - and ., and no . at its beginning"
            )
        if part and not self.batches.files_folder:
            raise ConfigError("--files-part is a part of --files-folder: give that as well")

    def _check_lora(self) -> None:
        lora = self.lora
        given = (("--lora-modules", lora.modules), ("--lora-folders", lora.folders))
        for flag, value in given:
            if value and not lora.enable_lora:
                raise ConfigError(f"{flag} is for adapters: give --enable-lora as well")
        if lora.max_cpu_loras and lora.max_cpu_loras < lora.max_loras:
            raise ConfigError(
                f"--max-cpu-loras {lora.max_cpu_loras} is below --max-loras {lora.max_loras}: adapters of running requests are in memory"
            )

    def _check_fleet(self) -> None:
        fleet = self.fleet
        if fleet.max_replicas and fleet.max_replicas < max(fleet.data_parallel_size, fleet.min_replicas):
            name, number = ("--min-replicas", fleet.min_replicas)
            if fleet.data_parallel_size > fleet.min_replicas:
                name, number = ("--data-parallel-size", fleet.data_parallel_size)
            raise ConfigError(f"--max-replicas {fleet.max_replicas} is below {name} {number}: raise it or leave it out")
        if fleet.min_replicas and not fleet.max_replicas:
            raise ConfigError(
                "--min-replicas needs --max-replicas: the number of replicas follows the load between the two"
            )
        if fleet.ray_address and not self.parallel.uses_ray:
            raise ConfigError("--ray-address needs --distributed-executor-backend ray: give both, or neither")
        disk = read_tiers(self.cache.kv_tier).disk
        if self.parallel.uses_ray and disk is not None and not os.path.isabs(disk.folder):
            raise ConfigError(
                f"--kv-tier disk: {disk.folder!r} must be an absolute path with --distributed-executor-backend ray: every node "
                "keeps a folder of its own there"
            )

    def _check_access(self) -> None:
        """Reject incomplete security settings: starting an open server instead would be the opposite of what was wanted."""
        server = self.server
        for name, given in (
            ("api-key", server.api_key),
            ("admin-key", server.admin_key),
            ("metrics-key", server.metrics_key),
        ):
            if given and not split_list(given):
                variable = f"OCTAVO_{name.upper().replace('-', '_')}"
                raise ConfigError(f"--{name} (or {variable}) {given!r} holds no key: give one, or leave it out")
        if server.key_settings:
            self._check_key_settings()
        if server.metrics_open and server.metrics_keys:
            raise ConfigError("--metrics-open needs no key and --metrics-key needs one: give one of the two")
        if shared := set(server.metrics_keys) & set(server.api_keys):
            raise ConfigError(f"{len(shared)} of the keys of --metrics-key are API keys, too: choose others")
        for name, value in (("--ssl-keyfile", server.ssl_keyfile), ("--ssl-ca-certs", server.ssl_ca_certs)):
            if value and not server.ssl_certfile:
                raise ConfigError(f"{name} is for TLS: give --ssl-certfile as well")
        for name in split_list(server.allowed_hosts):
            if not re.fullmatch(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*\.?", name, re.ASCII):
                raise ConfigError(
                    f"--allowed-hosts {name!r} is not a host name: give it without scheme, port and path (llm.example.com, "
                    "*.example.com, or * for any); IP addresses need not be named"
                )
        if server.allow_credentials and "*" in split_list(server.allowed_origins):
            raise ConfigError(
                "--allow-credentials with --allowed-origins * would let any web page act for its visitors: name the origins"
            )

    def _check_key_settings(self) -> None:
        from octavo import key_settings  # it brings msgspec, which --help does not need

        settings = key_settings.decode(self.server.key_settings)
        if unknown := len(settings.keys() - set(self.server.api_keys)):
            raise ConfigError(f"--key-settings has {unknown} keys that no --api-key, --admin-key or --api-key-file has")
        if any(each.budget_tokens for each in settings.values()) and not self.batches.files_folder:
            raise ConfigError(
                "a key has a budget of tokens, and what it has used must outlive the server: give --files-folder, where it is kept"
            )

    def _check_fairness(self) -> None:
        fairness = self.scheduler.fairness
        if fairness not in ("none", "key", "user") and not re.fullmatch(r"header:[\w-]+", fairness, re.ASCII):
            raise ConfigError(f"--fairness {fairness!r} must be none, key, user, or header:NAME")
        if fairness != "none" and self.scheduler.scheduling_policy != "fcfs":
            raise ConfigError(
                f"--fairness {fairness} serves the requests of one key in order of arrival: leave out --scheduling-policy "
                f"{self.scheduler.scheduling_policy}, or --fairness"
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
        raise ConfigError(f"{flag} must be {_describe_bounds(above, least, most)}, got {value}")


def _describe_bounds(above: float | None, least: float | None, most: float | None) -> str:
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
    """Return a copy with fields changed by name, in whichever section they are. Counts and sizes may be texts, as on the command line:
    "8k", "64M". An unknown name raises ConfigError."""
    if values.get("tokenizer") and values["tokenizer"] == values.get("model"):
        values["tokenizer"] = ""  # the model's own, which scripts of other servers often name as well
    changed: dict[str, Any] = {}
    for section, cls in sections():
        names = field_names(section)
        kinds = {option.name: option.metadata["kind"] for option in dataclasses.fields(cls)}
        mine = {names[name]: values.pop(name) for name in list(values) if name in names}
        mine = {name: _read_value(name, kinds[name], value) for name, value in mine.items()}
        if mine:
            changed[section] = dataclasses.replace(getattr(config, section), **mine)
    if values:
        raise unknown_option(sorted(values)[0], {name for section, _ in sections() for name in field_names(section)})
    return dataclasses.replace(config, **changed)


def offline(config: Config) -> Config:
    """A copy for work without a server: all of it is wanted soon, and no reader waits for the next token."""
    is_auto = config.scheduler.max_inter_token_ms == AUTO
    return replace(config, max_inter_token_ms=0.0) if is_auto else config


def unknown_option(name: str, known: Collection[str]) -> ConfigError:
    """The error for an option that does not exist: it names the nearest one, or all of them."""
    import difflib  # imported lazily: only needed for an error

    known = [option for option in known if option.islower()]  # not MODEL, which is no option by that name
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)
    instead = f"did you mean {close[0]!r}?" if close else f"the options are {', '.join(sorted(known))}"
    return ConfigError(f"unknown option {name!r}; {instead}")


COUNT_HINT = "give 8192, 8k (k = 1024), or auto if the flag accepts it"
SIZE_HINT = "give bytes, or K, M, G, T (powers of 1024) as in 512M or 1.5G"
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def read_count(text: str) -> int | None:
    """A count: 8192, 8k, 1.5k. None: it is none."""
    return _scaled(text, r"([0-9.]+)([km]?)")


def read_size(text: str) -> int | None:
    """A number of bytes: 1048576, 512M, 1.5G, 2GiB. None: it is none; 2GB is ambiguous (10^9 or 2^30)."""
    return _scaled(text, r"([0-9.]+)(?:([kmgt])(?:ib)?)?")


class DiskTier(NamedTuple):
    max_bytes: int
    folder: str


class KVTiers(NamedTuple):
    """The value of --kv-tier."""

    ram_bytes: int = 0  # 0: there is no such tier
    disk: DiskTier | None = None

    def __bool__(self) -> bool:
        return self.ram_bytes > 0 or self.disk is not None


def read_tiers(text: str) -> KVTiers:
    """The value of --kv-tier. Raises ConfigError."""
    tiers = KVTiers()
    for part in re.split(r",(?=\s*(?:ram|disk):)", text) if text else []:
        kind, _, rest = part.strip().partition(":")
        size_text, _, folder = rest.partition(":")
        num_bytes = read_size(size_text)
        if kind not in ("ram", "disk") or not num_bytes or (kind == "disk") != bool(folder):
            raise ConfigError(
                f"--kv-tier: {part!r} is no tier: give ram:SIZE, for example ram:8GiB, or disk:SIZE:FOLDER, for example "
                "disk:50GiB:/var/cache/octavo-kv"
            )
        if tiers.ram_bytes if kind == "ram" else tiers.disk:
            raise ConfigError(f"--kv-tier: there can be one tier of the kind {kind}: leave out the others")
        tiers = (
            tiers._replace(ram_bytes=num_bytes) if kind == "ram" else tiers._replace(disk=DiskTier(num_bytes, folder))
        )
    return tiers


def read_json_object(text: str, what: str) -> dict[str, Any]:
    """Parse a JSON object; an empty text is an empty one. `what`: the flag, for errors."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{what} must be a JSON object, got {text[:100]!r}")
    return value


def _read_value(name: str, kind: str, value: Any) -> Any:
    """A value of the Python API, which may have another form than the command line's."""
    if kind == "json" and isinstance(value, Mapping):
        try:
            return json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name} is not JSON: {error}") from None
    if kind == "names" and isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if not isinstance(value, str) or kind not in ("tokens", "bytes") or value == AUTO:
        return value
    found, hint = (read_count(value), COUNT_HINT) if kind == "tokens" else (read_size(value), SIZE_HINT)
    if found is None:
        raise ConfigError(f"{name}: {value!r} is not a {'count' if kind == 'tokens' else 'size'}: {hint}")
    return found


def _scaled(text: str, pattern: str) -> int | None:
    parts = re.fullmatch(pattern, text.strip().lower(), re.ASCII)
    if not parts:
        return None
    try:
        value = float(parts[1]) * _UNITS[parts[2] or ""] if "." in parts[1] else int(parts[1]) * _UNITS[parts[2] or ""]
        return int(value) if value == int(value) else None
    except (ValueError, OverflowError):  # "1.2.3"; too large for a float
        return None


def without_keys(config: Config) -> Config:
    """A copy for processes that have no use for API keys."""
    return replace(config, api_key="", admin_key="", metrics_key="", api_key_file="", key_settings="")
