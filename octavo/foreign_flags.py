"""Flags, commands and variables of other servers: what becomes of each flag of vLLM, and of the common ones of SGLang
and llama.cpp, that is not our own.

A flag is renamed to ours, or it is taken with a note that says why it has no effect, or it is refused with one sentence that
names the alternative. docs/reference/other-flags.md is generated from these tables."""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Source = Literal["vLLM", "SGLang", "llama.cpp", "Ollama"]
MAX_MEMBER_DEPTH = 8
"""How many objects a flag such as --hf-overrides.rope_scaling.factor may go through."""


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """`ours`: the flag that replaces it. `note`: why it has no effect. Neither: it is refused, for the reason in `why`."""

    source: Source
    ours: str = ""
    member: str = ""
    """Of the JSON object that `ours` takes: the one that the flag sets."""
    note: str = ""
    why: str = ""
    takes_value: bool = True
    harmless_values: frozenset[str] = frozenset()
    """If not empty: only these values, and objects whose members all have one of them, have no effect here; others are refused, for
    the reason in `why`."""
    harmless_members: frozenset[str] = frozenset()
    """Members of a JSON object that have no effect here, whatever their value is."""

    @property
    def fate(self) -> Literal["renamed", "no effect", "no effect for some values", "not offered"]:
        if self.ours:
            return "renamed"
        if self.harmless_values or self.harmless_members:
            return "no effect for some values"
        return "no effect" if self.note else "not offered"

    def is_harmless(self, value: object) -> bool:
        """Whether the flag has no effect here with this value: a text, or an object as a mapping or as JSON."""
        if not self.harmless_values and not self.harmless_members:
            return bool(self.note)
        if str(value).lower() in self.harmless_values:
            return True
        if isinstance(value, str) and value.startswith("{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return False
        return isinstance(value, Mapping) and all(
            name in self.harmless_members or str(member).lower() in self.harmless_values
            for name, member in value.items()
        )


def _renamed(source: Source, ours: str, *, takes_value: bool = True) -> ForeignFlag:
    return ForeignFlag(source, ours=ours, takes_value=takes_value)


def _noted(note: str, values: str = "", *, why: str = "", source: Source = "vLLM") -> ForeignFlag:
    """A flag with a value. `values`: those without effect; empty: all."""
    return ForeignFlag(source, note=note, why=why, harmless_values=frozenset(values.split()))


def _switch(note: str, source: Source = "vLLM") -> ForeignFlag:
    return ForeignFlag(source, note=note, takes_value=False)


def _refused(why: str, *, takes_value: bool = True, source: Source = "vLLM") -> ForeignFlag:
    return ForeignFlag(source, why=why, takes_value=takes_value)


def _refused_unless(why: str, values: str = "", members: str = "") -> ForeignFlag:
    """A flag that is refused, unless its value asks for what happens here anyway: a default, as start commands often have it."""
    return ForeignFlag(
        "vLLM",
        note=why,
        why=why,
        harmless_values=frozenset(values.split()),
        harmless_members=frozenset(members.split()),
    )


_NO_CODE = "code from a checkpoint is never run here; the supported architectures need none"
_LORA = "of adapters (--enable-lora), those of attention and MLP matrices are served, in a type that the server chooses"
_SPECULATION = "give it in --speculative-config"
_REPLICAS = (
    "--data-parallel-size starts and balances all replicas of a server; there is nothing to place or connect by hand"
)
_NODES = "ranks on several machines are placed by Ray: --distributed-executor-backend ray"
_PIPELINE = "a context is not split over ranks; --tensor-parallel-size splits each layer, --pipeline-parallel-size the list of layers"
_MEDIA = "only text goes in: images, audio and video are refused"
_OFFLOAD = "weights are kept on the device that computes; a packed checkpoint (GGUF, AWQ, GPTQ) takes less memory"
_TIERS = "--kv-tier keeps pages of prompts in host memory (of a GPU) and on disk, --swap-space those of preempted requests in host memory"
_TRANSFER = "KV pages are not sent to other servers"
_PLUGIN = "plug-in classes are not loaded"
_TUNED = "kernels are chosen by rules that were measured, at no cost at start-up"
_STATE_SPACE = "models with state-space layers are not supported"
_SLEEP = "a server of one model keeps it loaded; of several models (--models) POST /sleep unloads one"
_GRAPHS = "CUDA graphs are captured for the row counts that occur; --enforce-eager turns them off"
_ASYNC = "the next step is always planned while the current one runs"
_CHUNKED = "prompts are always computed in chunks; --max-num-batched-tokens is the size of a step"
_STATS = "there is no periodic log line of statistics: see /metrics"
_METRICS = "what it measures is not measured here; /metrics has what is"

_SWITCHES_REFUSED = {
    "enable-mixed-moe-lora-format": _LORA,
    "enable-moe-shared-loras": _LORA,
    "enable-tower-connector-lora": _LORA,
    "fully-sharded-loras": _LORA,
    "specialize-active-lora": _LORA,
    "data-parallel-external-lb": _REPLICAS,
    "data-parallel-hybrid-lb": _REPLICAS,
    "data-parallel-multi-port-external-lb": _REPLICAS,
    "enable-elastic-ep": _REPLICAS,
    "disable-nccl-for-dp-synchronization": _REPLICAS,
    "enable-eplb": "experts are divided evenly over ranks by --enable-expert-parallel, and stay where they are",
    "enable-ep-weight-filter": "with --enable-expert-parallel a rank reads only its own experts, always",
    "enable-dbo": "steps are not divided into micro-batches",
    "enable-hc-sp": "sequence parallelism is not supported; --tensor-parallel-size splits each layer",
    "dcp-q-replicate": _PIPELINE,
    "enable-sleep-mode": _SLEEP,
    "sleep-mode-offload-cudagraph": _SLEEP,
    "enable-prompt-embeds": "prompts are text or token ids; embeddings as a prompt are not supported",
    "enable-return-routed-experts": "the experts that were chosen are not returned",
    "return-sampling-mask": "the mask of sampled tokens is not returned; logprobs are",
    "enable-mm-embeds": _MEDIA,
    "interleave-mm-strings": _MEDIA,
    "mm-device-do-normalize": _MEDIA,
    "mm-encoder-only": _MEDIA,
    "trust-request-mm-kwargs": _MEDIA,
    "enable-flash-late-interaction": "late interaction models are not supported; /v1/embeddings serves encoders",
    "use-replayssm": _STATE_SPACE,
    "enable-mamba-cache-stochastic-rounding": _STATE_SPACE,
    "enable-mamba-shared-prefix-checkpoint": _STATE_SPACE,
    "enable-trace-replay": "octavo replay does that from a recording: every server records its schedule (--record-bytes)",
    "enable-fault-tolerance": "an engine that ends is always replaced and its requests continue; there is nothing to enable",
    "enable-log-outputs": "answers are never logged; --enable-log-requests logs a line per request",
    "enable-log-deltas": "answers are never logged; --enable-log-requests logs a line per request",
    "enable-ssl-refresh": "certificates are read at start-up: restart the server to renew them",
    "disable-sliding-window": "a model's sliding window is part of the model",
    "headless": _NODES,
    "tokens-only": "the server tokenizes; prompts may be token ids all the same",
    "enable-scale-out": _REPLICAS,
    "cohere-is-reasoning-model": "Cohere's own API is not offered; --reasoning-parser chooses how reasoning is parsed",
    "kv-sharing-fast-prefill": "models that share keys and values between layers for prefill are not supported",
    "long-prefill-token-threshold-adaptive": "--max-num-batched-tokens bounds the tokens of a step",
    "ray-workers-use-nsight": "ranks are not profiled; journeys (GET /v1/requests/ID) say where a request's time went",
    "grpc": "there is no gRPC API; the HTTP API is at --port",
    "skip-tokenizer-init": "the server tokenizes; prompts may be token ids all the same",
}
_REFUSED = {
    **dict.fromkeys(
        ("lora-dtype", "lora-target-modules", "default-mm-loras", "max-lora-cls-labels"), _LORA,
    ),
    **dict.fromkeys(("spec-method", "spec-model", "spec-tokens"), _SPECULATION),
    **dict.fromkeys(
        ("data-parallel-rank", "data-parallel-start-rank", "data-parallel-size-local", "data-parallel-address",
         "data-parallel-rpc-port", "data-parallel-backend", "data-parallel-supervisor-port", "dp-supervisor-probe-interval-s",
         "dp-supervisor-probe-timeout-s", "dp-supervisor-probe-failure-threshold", "dp-sync-interval", "elastic-ep-max-dp-size",
         "fault-tolerance-config"), _REPLICAS,
    ),
    **dict.fromkeys(("nnodes", "node-rank", "master-addr", "master-port"), _NODES),
    **dict.fromkeys(
        ("decode-context-parallel-size", "prefill-context-parallel-size", "cp-kv-cache-interleave-size",
         "dcp-kv-cache-interleave-size", "dcp-comm-backend"), _PIPELINE,
    ),
    **dict.fromkeys(("all2all-backend", "eplb-config", "expert-placement-strategy", "ubatch-size", "dbo-decode-token-threshold",
                     "dbo-prefill-token-threshold"), "experts are divided over ranks by --enable-expert-parallel, with one all-reduce"),
    **dict.fromkeys(
        ("limit-mm-per-prompt", "allowed-local-media-path", "allowed-media-domains", "media-io-kwargs",
         "mm-encoder-attn-backend", "mm-encoder-attn-dtype", "mm-encoder-fp8-scale-path", "mm-encoder-fp8-scale-save-margin",
         "mm-encoder-fp8-scale-save-path", "mm-encoder-tp-mode", "mm-hasher-algorithm", "mm-ipc-gpu-memory-gb",
         "mm-processor-cache-gb", "mm-processor-cache-type", "mm-processor-device", "mm-processor-kwargs",
         "mm-shm-cache-max-object-size-mb", "mm-tensor-ipc", "video-pruning-method", "video-pruning-rate"), _MEDIA,
    ),
    **dict.fromkeys(
        ("cpu-offload-gb", "cpu-offload-params", "offload-backend", "offload-group-size", "offload-num-in-group", "offload-params",
         "offload-prefetch-step"), _OFFLOAD,
    ),
    **dict.fromkeys(("kv-offloading-size", "kv-offloading-backend", "prefix-cache-retention-interval"), _TIERS),
    **dict.fromkeys(
        ("kv-transfer-config", "kv-events-config", "ec-transfer-config", "ec-manager-config", "weight-transfer-config"), _TRANSFER
    ),
    **dict.fromkeys(
        ("worker-cls", "worker-extension-cls", "scheduler-cls", "logits-processors", "io-processor-plugin",
         "reasoning-parser-plugin", "tool-parser-plugin", "middleware", "model-class-overrides", "additional-config",
         "engram-config", "aux-output-config"), _PLUGIN,
    ),
    **dict.fromkeys(
        ("mamba-backend", "mamba-block-size", "mamba-cache-dtype", "mamba-cache-mode", "mamba-cache-philox-rounds",
         "mamba-ssm-cache-dtype", "mamba-ssu-algorithm", "replayssm-buffer-len", "gdn-prefill-backend", "kda-decode-backend",
         "kda-prefill-backend"), _STATE_SPACE,
    ),
    **dict.fromkeys(("sleep-preserve-parameter-names",), _SLEEP),
    "per-request-spec-decode-metrics": "the journey of a request (GET /v1/requests/ID) has its drafted and accepted tokens",
    "sleep-mode-backend": _SLEEP,
    "reasoning-effort-map": "requests set reasoning_effort, or send the template's own word for it in chat_template_kwargs",
    "attention-config": "--attention-backend chooses the implementation of attention",
    "quantization-config": "the checkpoint says how it is quantised; --quantization rounds one that is not",
    "pooler-config": "an encoder's own files say how it pools",
    "structured-outputs-config": "there is one grammar engine, llguidance; requests choose white space with whitespace_pattern",
    "reasoning-config": "--reasoning-parser chooses how reasoning is parsed; requests set reasoning_effort and thinking_token_budget",
    "profiler-config": "there is no profiler endpoint; journeys (GET /v1/requests/ID) say where a request's time went",
    "diffusion-config": "diffusion models are not supported",
    "watermark-config": "output is not watermarked",
    "num-gpu-blocks-override": "--kv-cache-memory-bytes sets the memory for KV pages",
    "kv-cache-dtype-skip-layers": "--kv-cache-dtype applies to all layers",
    "hf-config-path": "the configuration is read from the model's folder: put config.json there",
    "hf-token": "set the environment variable HF_TOKEN: a token on the command line is visible to other users",
    "code-revision": _NO_CODE,
    "tokenizer-revision": "--revision applies to the tokenizer too; --tokenizer names another folder",
    "grpc-port": "there is no gRPC API; the HTTP API is at --port",
    "tool-server": "built-in tools are not run by the server; clients run the tools they declare",
    "chat-template-content-format": "the format is found by trying the template",
    "response-role": "the role of answers is assistant",
    "tool-strict-level": "a tool's own `strict` member decides",
    "fingerprint-mode": "system_fingerprint names the build, the model and how it computes",
    "fingerprint-value": "system_fingerprint names the build, the model and how it computes",
    "cohere-format": "Cohere's own API is not offered",
    "anthropic-disabled-thinking-effort": "requests set thinking and output_config.effort themselves",
    "ssl-ciphers": "TLS uses Python's default ciphers",
    "ssl-cert-reqs": "--ssl-ca-certs makes client certificates required",
    "log-config-file": "--log-format chooses between text and JSON",
    "logging-config": "--log-format chooses between text and JSON",
    "disable-access-log-for-endpoints": "there is no access log unless --enable-log-requests is given, and that leaves out /health and /metrics",
    "custom-histogram-buckets": "the buckets of histograms are those that dashboards for vLLM expect",
    "show-hidden-metrics-for-version": "no metrics are hidden",
    "max-num-active-seqs": "--max-num-seqs bounds the rows",
    "watermark": "pages are not held back: a request is admitted if its prompt fits",
    "long-prefill-token-threshold": "--max-num-batched-tokens bounds the tokens of a step",
    "device-ids": "set the environment variable CUDA_VISIBLE_DEVICES",
}  # fmt: skip
_UNLESS_DEFAULT = {
    "nnodes": "1",
    "node-rank": "0",
    "data-parallel-size-local": "1",
    "data-parallel-start-rank": "0",
    "decode-context-parallel-size": "1",
    "prefill-context-parallel-size": "1",
    "cpu-offload-gb": "0 0.0",
    "limit-mm-per-prompt": "0",
    "mm-processor-cache-gb": "0 0.0",
    "long-prefill-token-threshold": "0",
    "lora-dtype": "auto",
    "mamba-cache-dtype": "auto",
    "mamba-ssm-cache-dtype": "auto",
    "chat-template-content-format": "auto",
    "response-role": "assistant",
}
"""Of the refused flags: the values that ask for what happens here anyway."""
_SWITCHES = {
    "trust-remote-code": _NO_CODE,
    "disable-log-stats": _STATS,
    "disable-log-requests": "requests are not logged unless --enable-log-requests is given",
    "disable-uvicorn-access-log": "there is no access log unless --enable-log-requests is given",
    "enable-chunked-prefill": _CHUNKED,
    "async-scheduling": _ASYNC,
    "disable-custom-all-reduce": "ranks sum by torch.distributed",
    "disable-cascade-attn": _TUNED,
    "disable-chunked-mm-input": _MEDIA,
    "disable-hybrid-kv-cache-manager": "layers with windows always have page tables of their own",
    "return-tokens-as-token-ids": "requests set return_tokens_as_token_ids",
    "enable-prompt-tokens-details": "usage.prompt_tokens_details is always returned",
    "enable-server-load-tracking": "/metrics and /health/progress always have the load",
    "enable-force-include-usage": "streams include usage if stream_options.include_usage is set",
    "enable-tokenizer-info-endpoint": "/tokenizer_info is always there",
    "enable-request-id-headers": "every response has the header x-request-id",
    "enable-per-request-metrics": "GET /v1/requests/ID has the times of each request",
    "exclude-tools-when-tool-choice-none": "with tool_choice none, tools are left out of the prompt where the template allows",
    "disable-fastapi-docs": "/docs needs an API key where there are keys, and shows what is in this documentation",
    "enable-offline-docs": "/docs loads nothing from elsewhere",
    "log-error-stack": "the log has the stack of every unexpected error",
    "aggregate-engine-logging": "there is one engine and one log",
    "enable-flashinfer-autotune": _TUNED,
    "enable-cumem-allocator": "torch's allocator is used",
    "enable-shm-tensor-arena": "tensors are not sent between processes",
    "enable-batch-sharded-sampling": "one rank samples",
    "enable-nccl-comm-suspend": _SLEEP,
    "enable-layerwise-nvtx-tracing": _METRICS,
    "enable-logging-iteration-details": _METRICS,
    "cudagraph-metrics": _METRICS,
    "kv-cache-metrics": "/metrics and the cockpit have the use of KV pages",
    "enable-mfu-metrics": _METRICS,
    "fail-on-environ-validation": "unknown environment variables have no effect",
    "use-tqdm-on-load": "the start reports its progress",
    "scheduler-reserve-full-isl": "a request is admitted when pages for its whole prompt are free",
    "language-model-only": "only the text part of a model is loaded",
    "skip-mm-profiling": _MEDIA,
    "numa-bind": "--cpu-pinning pins compute threads to cores",
    "use-fp64-gumbel": "draws are exact enough in float32: they are seeded by request and position",
    "jit-monitor-verbose": _TUNED,
    "monokernel": _TUNED,
    "allow-deprecated-quantization": "quantised formats that can be read are accepted",
    "swa-bounded-replay": _TUNED,
    "disable-frontend-multiprocessing": "API processes are separate; --api-processes sets how many",
}
_VALUES = {
    "tokenizer-mode": _noted("the tokenizer's files decide", "auto hf slow mistral",
                             why="the tokenizer's files decide; only auto, hf, slow and mistral are known"),
    "config-format": _noted("config.json or params.json is found by itself", "auto hf mistral",
                            why="config.json or params.json is found by itself"),
    "model-impl": _noted("models are Octavo's own", "auto vllm", why="models are Octavo's own; transformers' are not used"),
    "runner": _noted("what a model does follows from its files", "auto generate pooling",
                     why="what a model does follows from its files"),
    "convert": _noted("what a model does follows from its files", "auto none", why="models are not converted"),
    "logprobs-mode": _noted("logprobs are those of the model, before sampling parameters", "raw_logprobs",
                            why="only raw_logprobs is supported"),
    "prefix-caching-hash-algo": _noted("prefixes are keyed by a salted 128-bit hash"),
    "prefix-match-unit": _noted("prefixes match by whole pages (--block-size)"),
    "max-seq-len-to-capture": _noted(_GRAPHS),
    "max-cudagraph-capture-size": _noted(_GRAPHS),
    "cudagraph-capture-sizes": _noted(_GRAPHS),
    "compilation-config": _noted("nothing goes through torch.compile; " + _TUNED),
    "optimization-level": _noted("nothing goes through torch.compile; " + _TUNED),
    "performance-mode": _noted(_TUNED),
    "kernel-config": _noted(_TUNED),
    "watchdog-config": _noted("an engine that hangs is always found and replaced: --step-timeout is the longest time of a step"),
    "h11-max-header-count": _renamed("vLLM", "--max-headers"),
    "h11-max-incomplete-event-size": _renamed("vLLM", "--max-head-bytes"),
    "ir-op-priority": _noted(_TUNED),
    "moe-backend": _noted(_TUNED),
    "linear-backend": _noted(_TUNED),
    "sparse-indexer-topk-backend": _noted(_TUNED),
    "jit-monitor-mode": _noted(_TUNED),
    "max-parallel-loading-workers": _noted("weights are read in parallel as the disk allows"),
    "safetensors-load-strategy": _noted("weights are read in parallel as the disk allows"),
    "safetensors-prefetch-block-size": _noted("weights are read in parallel as the disk allows"),
    "safetensors-prefetch-num-threads": _noted("weights are read in parallel as the disk allows"),
    "model-loader-extra-config": _noted("weights are read in parallel as the disk allows"),
    "ignore-patterns": _noted("only files that the model needs are downloaded"),
    "pt-load-map-location": _noted("weights are read to the device that computes"),
    "renderer-num-workers": _noted("--api-processes sets how many processes render and tokenize"),
    "collect-detailed-traces": _noted("spans have the stages of a request: see --otlp-traces-endpoint"),
    "kv-cache-metrics-sample": _noted("/metrics and the cockpit have the use of KV pages"),
    "prefill-schedule-interval": _noted("prompts are admitted in every step"),
    "max-num-scheduled-tokens": _renamed("vLLM", "--max-num-batched-tokens"),
    "cpu-distributed-timeout-seconds": _noted("--start-timeout and --step-timeout bound the waits"),
    "distributed-timeout-seconds": _noted("--start-timeout and --step-timeout bound the waits"),
    "numa-bind-cpus": _noted("--cpu-pinning pins compute threads to cores"),
    "numa-bind-nodes": _noted("--cpu-pinning pins compute threads to cores"),
    "log-level": _renamed("vLLM", "--uvicorn-log-level"),
    "max-num-queued-reqs": _renamed("vLLM", "--max-waiting-requests"),
    "max-num-queued-tokens": _renamed("vLLM", "--max-waiting-tokens"),
    "device-memory-utilization": _renamed("vLLM", "--gpu-memory-utilization"),
}  # fmt: skip
_EARLIER = {
    "task": _noted("what a model does follows from its files", "auto generate embed embedding",
                   why="what a model does follows from its files: decoders generate and embed, encoders embed"),
    "guided-decoding-backend": _noted("there is one grammar engine, llguidance"),
    "num-scheduler-steps": _noted(_ASYNC),
    "rope-scaling": _refused("""give it in --hf-overrides: '{"rope_scaling": …}'"""),
    "rope-theta": _refused("""give it in --hf-overrides: '{"rope_theta": …}'"""),
    "speculative-model": _refused(_SPECULATION),
    "num-speculative-tokens": _refused(_SPECULATION),
    "ngram-prompt-lookup-max": _refused(_SPECULATION),
    "ngram-prompt-lookup-min": _refused(_SPECULATION),
    "preemption-mode": _noted("preempted requests go to host memory where --swap-space has room, else they are computed again"),
    "max-context-len-to-capture": _noted(_GRAPHS),
    "enable-reasoning": _switch("--reasoning-parser or the chat template chooses how reasoning is parsed"),
    "use-v2-block-manager": _switch("there is one manager of KV pages"),
    "disable-async-output-proc": _switch(_ASYNC),
    "enable-multi-step": _switch(_ASYNC),
}  # fmt: skip
"""Flags that vLLM had until some version, and that scripts still have."""
_SHORT = {
    "q": "quantization", "n": "nnodes", "r": "node-rank",
    "asc": "api-server-count", "O": "compilation-config",
    "sc": "speculative-config", "cc": "compilation-config", "ac": "attention-config",
    "dc": "diffusion-config", "dcp": "decode-context-parallel-size", "pcp": "prefill-context-parallel-size",
    "dpn": "data-parallel-rank", "dpr": "data-parallel-start-rank", "dpl": "data-parallel-size-local", "dpa": "data-parallel-address",
    "dpp": "data-parallel-rpc-port", "dpb": "data-parallel-backend", "dph": "data-parallel-hybrid-lb", "dpe": "data-parallel-external-lb",
    "dpm": "data-parallel-multi-port-external-lb",
}  # fmt: skip
_SGLANG = {
    "model-path": "--model",
    "mem-fraction-static": "--gpu-memory-utilization",
    "context-length": "--max-model-len",
    "max-running-requests": "--max-num-seqs",
    "chunked-prefill-size": "--max-num-batched-tokens",
    "schedule-policy": "--scheduling-policy",
    "max-queued-requests": "--max-waiting-requests",
    "tokenizer-path": "--tokenizer",
}
_CPP_RENAMED = {
    "--model": "-m -hf -hfr --hf-repo",
    "--max-model-len": "-c --ctx-size",
    "--cpu-threads": "-t --threads",
    "--max-num-seqs": "-np --parallel",
    "--max-num-batched-tokens": "-b --batch-size",
    "--served-model-name": "-a --alias",
    "--chat-template": "--chat-template-file",
    "--default-chat-template-kwargs": "--chat-template-kwargs",
    "--kv-cache-dtype": "-ctk --cache-type-k",
    "--seed": "-s",
    "--device": "-dev",
    "--root-path": "--api-prefix",
    "--ssl-keyfile": "--ssl-key-file",
    "--ssl-certfile": "--ssl-cert-file",
    "--allowed-origins": "--cors-origins",
    "--allowed-methods": "--cors-methods",
    "--allowed-headers": "--cors-headers",
    "--sse-keep-alive-interval": "--sse-ping-interval",
    "--max-loaded-models": "--models-max",
}
_CPP_RENAMED_SWITCHES = {"--no-enable-prefix-caching": "--no-cache-prompt", "--allow-credentials": "--cors-credentials"}
_CPP_SAMPLING = {
    "--temp": "--temperature",
    "-n": "--max-tokens",
    "--predict": "--max-tokens",
    "--n-predict": "--max-tokens",
}
"""Of commands that send requests themselves (octavo chat, run, complete)."""
_CPP_DEFAULTS = {
    "--temp": "temperature",
    "--temperature": "temperature",
    "--top-k": "top_k",
    "--top-p": "top_p",
    "--min-p": "min_p",
    "--repeat-penalty": "repetition_penalty",
}
"""Of a server: defaults for requests that do not set it. The member of --override-generation-config."""
_SAMPLING = "requests set it; --override-generation-config sets the defaults"
_METHODS = "temperature, top_k, top_p, min_p and penalties shape the draw; there is no other sampler"
_PINNING = "--cpu-pinning pins compute threads to cores"
_PRIORITY = "threads have the priority of the process: start it with nice"
_SCHEMA = "requests send response_format or structured_outputs"
_DRAFTS = "--speculative-config has the settings of drafts"
_ADAPTERS = "name adapters with --enable-lora --lora-modules NAME=PATH; a request chooses one as its model"
_GGUF_VALUES = "a GGUF file says how positions are encoded; --hf-overrides replaces values of a config.json"
_PAGES = "the pages are Octavo's own"
_NO_TOOLS = "the server runs no tools: clients run those that they declare"
_ONE_DEVICE = "all layers run on one device: --device chooses the GPU or the CPU"
_NO_SHIFT = "a context is never shifted: an answer ends where the context is full"
_MAPPED = "weights are mapped from the file where that is fastest"
_CPP_VALUES = {
    "-ngl --n-gpu-layers --gpu-layers": _noted(_ONE_DEVICE),
    "-sm --split-mode -ts --tensor-split -mg --main-gpu": _refused("--tensor-parallel-size divides each layer over GPUs; CUDA_VISIBLE_DEVICES names them"),
    "--rpc": _refused(_NODES),
    "-fa --flash-attn": _noted("--attention-backend chooses; auto is the fastest"),
    "-fit --fit -fitt --fit-target -fitc --fit-ctx": _noted("limits that are not given are chosen to fit the memory"),
    "-lm --load-mode -lzm --lazy-mode": _noted(_MAPPED),
    "-ub --ubatch-size": _noted("a step is not divided further"),
    "-tb --threads-batch": _noted("prompts are computed by the threads of --cpu-threads"),
    "-C --cpu-mask -Cr --cpu-range --cpu-strict -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --numa": _noted(_PINNING),
    "--prio --prio-batch": _noted(_PRIORITY),
    "--poll --poll-batch": _noted("threads spin for as long as that was measured to pay"),
    "--threads-http": _noted("--api-processes sets how many processes handle requests"),
    "-ctv --cache-type-v": _noted("--kv-cache-dtype is for keys and values"),
    "--cache-reuse -sps --slot-prompt-similarity": _noted("prefixes that requests share are always reused, by whole pages"),
    "-cram --cache-ram": _noted("--kv-cache-memory-bytes sets the memory for KV pages, those of cached prefixes among them"),
    "-ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step": _noted("prefixes are cached by whole pages, in layers with windows, too"),
    "--kv-unified-per-slot": _noted("all requests share the KV pages"),
    "-dt --defrag-thold": _noted("pages have one size and need no defragmentation"),
    "--keep": _noted(_NO_SHIFT),
    "--predict --n-predict": _refused_unless("requests set max_tokens", "-1 -2"),
    "--presence-penalty --frequency-penalty": _refused_unless("requests set it", "0 0.0 0.00"),
    "--mirostat --dry-multiplier --xtc-probability --dynatemp-range": _refused_unless(_METHODS, "0 0.0 0.00"),
    "--typical --typical-p": _refused_unless(_METHODS, "1 1.0 1.00"),
    "--top-nsigma --top-n-sigma --adaptive-target": _refused_unless(_METHODS, "-1 -1.0 -1.00"),
    "--dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --xtc-threshold --dynatemp-exp --mirostat-lr --mirostat-ent "
    "--adaptive-decay": _noted(_METHODS),
    "--samplers --sampler-seq --sampling-seq": _refused(_METHODS),
    "--repeat-last-n": _refused_unless("penalties count the whole text", "-1"),
    "-l --logit-bias": _refused("requests set logit_bias"),
    "--reverse-prompt": _refused("requests set stop"),
    "-j --json-schema -jf --json-schema-file --grammar --grammar-file": _refused(_SCHEMA),
    "-f --file -bf --binary-file": _refused("prompts come in requests; octavo complete - reads one from standard input"),
    "--reasoning-format": _noted("--reasoning-parser or the chat template chooses how reasoning is parsed"),
    "--reasoning-budget": _refused_unless("requests set thinking_token_budget", "-1"),
    "--reasoning-budget-message": _refused("requests set thinking_token_budget; the model's own end of reasoning follows it"),
    "-rea --reasoning": _refused_unless("requests set reasoning_effort, or a variable of the template in chat_template_kwargs", "auto"),
    "--reasoning-effort": _refused("requests set reasoning_effort"),
    "--rope-freq-base --rope-freq-scale --rope-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast "
    "--override-kv": _refused(_GGUF_VALUES),
    "-ot --override-tensor -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn": _refused(_OFFLOAD),
    "--lora --lora-scaled": _refused(_ADAPTERS),
    "--control-vector --control-vector-scaled --control-vector-layer-range": _refused("control vectors are not supported"),
    "-mm --mmproj -mmu --mmproj-url --image-min-tokens --image-max-tokens --media-path --mtmd-batch-max-tokens --video-ffmpeg-dir --video-fps "
    "--video-timestamp-interval": _refused(_MEDIA),
    "-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf": _refused("name the draft model with --speculative-config, as model, with the method draft_model"),
    "--draft --draft-n --draft-max --draft-min --draft-n-min --draft-p-min --draft-p-split --spec-type --spec-draft-n-max --spec-draft-n-min "
    "--spec-draft-p-min --spec-draft-p-split --spec-synth-len --spec-synth-rates": _refused(_DRAFTS),
    "--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits --spec-ngram-mod-n-match --spec-ngram-mod-n-min --spec-ngram-mod-n-max "
    "--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m "
    "--spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits": _refused(_DRAFTS),
    "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic": _noted("drafts are found in the texts of requests; no file keeps them"),
    "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl -devd --device-draft --spec-draft-device -ctkd --cache-type-k-draft "
    "--spec-draft-type-k -ctvd --cache-type-v-draft --spec-draft-type-v": _noted("a draft model runs on the model's device, with pages of the same type"),
    "-td --threads-draft --spec-draft-threads -tbd --threads-batch-draft --spec-draft-threads-batch -Cd --cpu-mask-draft --spec-draft-cpu-mask "
    "-Crd --cpu-range-draft --spec-draft-cpu-range --cpu-strict-draft --spec-draft-cpu-strict -Cbd --cpu-mask-batch-draft "
    "--spec-draft-cpu-mask-batch --cpu-strict-batch-draft --spec-draft-cpu-strict-batch --prio-draft --spec-draft-prio --prio-batch-draft "
    "--spec-draft-prio-batch --poll-draft --spec-draft-poll --poll-batch-draft --spec-draft-poll-batch": _noted("a draft model is computed by the model's threads"),
    "-otd --override-tensor-draft --spec-draft-override-tensor -ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe": _refused(_OFFLOAD),
    "-mu --model-url -hff --hf-file -dr --docker-repo": _refused("name the model as owner/name-GGUF:Q4_K_M, or download the file and name it"),
    "-hft": _refused("set the environment variable HF_TOKEN: a token on the command line is visible to other users"),
    "--models-dir --models-preset": _refused("name several models with --models NAME=MODEL,…"),
    "--pooling": _refused("an encoder's own files say how it pools; requests may choose"),
    "--embd-normalize": _refused("requests to /v1/embeddings set normalize"),
    "--slot-save-path": _refused("--kv-tier keeps pages of prompts on disk"),
    "--sleep-idle-seconds": _refused_unless(_SLEEP, "-1"),
    "-to --timeout": _noted("a request that does not come is ended after 60 s, a reader that takes nothing after 300 s"),
    "--tags": _noted("a model has names only: --served-model-name"),
    "--path --ui-config --ui-config-file --webui-config --webui-config-file": _refused(_PAGES),
    "--tools --tools-runtime --mcp-servers-config --mcp-servers-json": _refused(_NO_TOOLS),
    "--log-file": _refused("the log goes to standard error: redirect it"),
    "--log-prompts-dir": _refused("--enable-log-requests --log-prompts logs prompts"),
    "-lv --verbosity --log-verbosity": _noted("--uvicorn-log-level sets what is logged"),
    "--log-colors": _noted("the log has no colours"),
}  # fmt: skip
_CPP_SWITCHES = {
    "--mlock --mmap --no-mmap -dio --direct-io -ndio --no-direct-io": _switch(_MAPPED),
    "--jinja": _switch("chat templates are always used"),
    "-cb --cont-batching -nocb": _switch("batching is always continuous"),
    "--metrics": _switch("/metrics is always there"),
    "--props --slots --no-slots": _switch("/props and /slots can be read, and change nothing"),
    "--webui --ui": _switch("the pages are always there; they need a key where the server has keys"),
    "--embedding --embeddings": _switch("vectors are always at /v1/embeddings, and encoders serve nothing else"),
    "--warmup": _switch("the start always runs a step"),
    "--context-shift": _switch(_NO_SHIFT),
    "-kvo --kv-offload -nkvo": _switch("KV pages are on the device that computes"),
    "-kvu --kv-unified -no-kvu": _switch("all requests share the KV pages"),
    "--swa-full": _switch("layers with windows keep the pages in their window"),
    "--cache-prompt --cache-idle-slots": _switch("prefixes stay in the cache while there is room; --no-enable-prefix-caching turns that off"),
    "--op-offload --no-host": _switch(_ONE_DEVICE),
    "--repack -nr": _switch("weights are packed for the kernels where that is faster"),
    "--check-tensors": _switch("octavo doctor MODEL --deep looks for NaN in every weight"),
    "-bs --backend-sampling --spec-draft-backend-sampling": _switch("tokens are drawn on the device that computes"),
    "-e --escape": _switch("prompts come in requests, as JSON"),
    "--perf": _switch("/metrics and GET /v1/requests/ID always have the times"),
    "--log-disable -v --verbose --log-verbose": _switch("--uvicorn-log-level sets what is logged"),
    "--log-prefix --log-timestamps": _switch("every line of the log has its time"),
    "--log-jsonl": _refused("--log-format json does that", takes_value=False),
    "-cmoe --cpu-moe -cmoed --cpu-moe-draft --spec-draft-cpu-moe": _refused(_OFFLOAD, takes_value=False),
    "--reranking --rerank": _switch("documents are always reranked at /v1/rerank"),
    "--reuse-port": _switch("API processes share one socket"),
    "--mmproj-auto --mmproj-offload": _switch(_MEDIA),
    "--reasoning-preserve": _switch("the chat template decides which reasoning of earlier answers it takes"),
    "--prefill-assistant": _switch("an assistant's message at the end is continued if the request sets continue_final_message"),
    "--skip-chat-parsing": _refused("tool calls and reasoning are always parsed; /v1/completions has the text as it is", takes_value=False),
    "--models-autoload": _switch("--load-on-demand loads several models as requests name them"),
    "--ignore-eos": _refused("requests set ignore_eos", takes_value=False),
    "-sp --special": _refused("requests set skip_special_tokens to false", takes_value=False),
    "--spm-infill": _refused("/infill has the order prefix, suffix, middle", takes_value=False),
    "--spec-default": _switch("drafts from the text are the default on a CPU; " + _DRAFTS),
    "--lora-init-without-apply": _switch(_ADAPTERS),
    "-ag --agent -no-ag --ui-mcp-proxy --webui-mcp-proxy": _refused(_NO_TOOLS, takes_value=False),
    "--offline": _refused("set the environment variable HF_HUB_OFFLINE=1", takes_value=False),
    "--list-devices": _refused("octavo doctor lists them", takes_value=False),
    "-cl --cache-list": _refused("octavo list does that", takes_value=False),
    "--completion-bash": _refused("octavo completion bash does that", takes_value=False),
    "--usage": _refused("octavo serve --help does that", takes_value=False),
    "--version": _refused("octavo --version does that", takes_value=False),
    "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec "
    "--fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default": _refused("name the model: -hf owner/name-GGUF:Q4_K_M", takes_value=False),
}  # fmt: skip


def _tables() -> dict[str, ForeignFlag]:
    found = {f"--{name}": _refused(why) for name, why in _REFUSED.items()}
    found |= {f"--{name}": _refused_unless(_REFUSED[name], values) for name, values in _UNLESS_DEFAULT.items()}
    found["--structured-outputs-config"] = _refused_unless(_REFUSED["structured-outputs-config"], members="backend")
    found |= {f"--{name}": _refused(why, takes_value=False) for name, why in _SWITCHES_REFUSED.items()}
    found |= {f"--{name}": _switch(note) for name, note in _SWITCHES.items()}
    found |= {f"--{name}": flag for name, flag in _VALUES.items()}
    found |= {f"--{name}": flag for name, flag in _EARLIER.items()}
    for short, name in _SHORT.items():
        found[f"-{short}"] = found.get(f"--{name}") or _renamed("vLLM", f"--{name}")
    # Both servers have an -n, and it means different things.
    found["-n"] = _refused_unless(f"requests set max_tokens (llama.cpp's -n); {_NODES} (vLLM's -n)", "1 -1 -2")
    found["-ep"] = _renamed("vLLM", "--enable-expert-parallel", takes_value=False)
    found |= {f"--{name}": _renamed("SGLang", ours) for name, ours in _SGLANG.items()}
    found["--disable-radix-cache"] = _renamed("SGLang", "--no-enable-prefix-caching", takes_value=False)
    found["--enable-metrics"] = _switch("/metrics is always there", "SGLang")
    for ours, names in _CPP_RENAMED.items():
        found |= dict.fromkeys(names.split(), _renamed("llama.cpp", ours))
    for ours, name in _CPP_RENAMED_SWITCHES.items():
        found[name] = _renamed("llama.cpp", ours, takes_value=False)
    for name, member in _CPP_DEFAULTS.items():
        found[name] = ForeignFlag("llama.cpp", ours="--override-generation-config", member=member, why=_SAMPLING)
    for names, flag in {**_CPP_VALUES, **_CPP_SWITCHES}.items():
        for name in names.split():
            found[name] = dataclasses.replace(flag, source="llama.cpp")
    return found


FOREIGN: dict[str, ForeignFlag] = _tables()

OF_OLLAMA_RUN: dict[str, ForeignFlag] = {
    "--verbose": _switch("octavo top and the cockpit show the times of each request", "Ollama"),
    "--nowordwrap": _switch(
        "lines are broken between words on a terminal only; octavo run MODEL PROMPT | cat leaves them whole", "Ollama"
    ),
    "--insecure": _switch("HF_ENDPOINT names a mirror of the hub, which may be without TLS", "Ollama"),
    "--keepalive": _noted(
        "a server that is started here ends with the conversation; --keep leaves it running", source="Ollama"
    ),
    "--format": _refused(
        "requests send format to /api/chat, or response_format to /v1/chat/completions", source="Ollama"
    ),
    "--think": _refused(
        "requests send think to /api/chat, or reasoning_effort to /v1/chat/completions", source="Ollama"
    ),
    "--hidethinking": _refused("an answer is shown as it comes", takes_value=False, source="Ollama"),
}
"""Flags of `ollama run` that `octavo run` does not have."""
FOREIGN_COMMANDS = {
    "ls": "octavo list does that",
    "show": "octavo doctor MODEL says what a model is and needs; a server answers POST /api/show",
    "stop": "octavo ps names the server's process, and kill PID stops it",
    "create": "there are no Modelfiles: requests have the system message (/system in octavo run), and octavo serve has "
    "--override-generation-config and --chat-template",
    "cp": "octavo serve MODEL --served-model-name NAME gives a model another name",
    "push": "models are not sent to the hub",
    "version": "octavo --version does that",
    "collect-env": "octavo --version and octavo doctor do that",
}
"""Commands of Ollama and vLLM that Octavo does not have, with what does the same."""
FOREIGN_VARIABLES = {
    "VLLM_ATTENTION_BACKEND": "--attention-backend",
    "VLLM_LOGGING_LEVEL": "--uvicorn-log-level",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory-bytes",
    "VLLM_CPU_OMP_THREADS_BIND": "--cpu-threads",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "--lora-folders",
    "VLLM_BATCH_INVARIANT": "--deterministic",
    "VLLM_ENGINE_READY_TIMEOUT_S": "--start-timeout",
    "VLLM_CACHE_ROOT": "OCTAVO_CACHE",
    "OLLAMA_MODELS": "OCTAVO_CACHE",
    "OLLAMA_HOST": "--host",
    "OLLAMA_ORIGINS": "--allowed-origins",
    "OLLAMA_NUM_PARALLEL": "--max-num-seqs",
    "OLLAMA_MAX_QUEUE": "--max-waiting-requests",
    "OLLAMA_CONTEXT_LENGTH": "--max-model-len",
    "OLLAMA_KV_CACHE_TYPE": "--kv-cache-dtype",
    "OLLAMA_KEEP_ALIVE": "--model-idle-seconds",
    "OLLAMA_MAX_LOADED_MODELS": "--max-loaded-models",
}
"""Environment variables of vLLM and Ollama, and the flag or variable that does the same."""
_PREFIXES = ("VLLM_", "OLLAMA_", "LLAMA_ARG_")


def foreign_variables(environ: Mapping[str, str], read: Collection[str]) -> list[str]:
    """Notes about variables of other servers that have no effect. `read`: those that are read all the same."""
    found = []
    for name in sorted(name for name in environ if name.startswith(_PREFIXES) and name not in read):
        ours = FOREIGN_VARIABLES.get(name, "")
        if name.startswith("LLAMA_ARG_"):
            flag = FOREIGN.get("--" + name.removeprefix("LLAMA_ARG_").lower().replace("_", "-"))
            ours = flag.ours if flag is not None else ""
        found.append(f"the environment variable {name} has no effect here" + (f": use {ours}" if ours else ""))
    return found


_FROM_FILES = "auto", "the model's files decide how weights are read"
_AS_QUANTISED = "auto", "the checkpoint says how it is quantised; int4 rounds one that is not"
_ONE_FP8 = "fp8", "there is one way to round weights to fp8"
VALUES: dict[str, dict[str, tuple[str, str]]] = {
    "--dtype": {"half": ("float16", ""), "float": ("float32", "")},
    "--load-format": dict.fromkeys(
        ("safetensors", "pt", "hf", "gguf", "npcache", "fastsafetensors", "instanttensor", "runai_streamer"), _FROM_FILES
    ),
    "--quantization": dict.fromkeys(
        ("awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin", "bitsandbytes", "mxfp4", "gpt_oss_mxfp4", "fbgemm_fp8",
         "compressed-tensors", "gguf"), _AS_QUANTISED,
    ) | dict.fromkeys(("fp8_per_tensor", "fp8_per_channel", "fp8_per_block"), _ONE_FP8),
    "--device": {"none": ("cpu", "")},
    "--kv-cache-dtype": {
        "fp8_e4m3": ("fp8", ""), "f16": ("float16", ""), "f32": ("float32", ""), "q8_0": ("int8", ""),
    },
}  # fmt: skip
"""Values that other servers know of flags that are ours, too: (our value, why that is the same)."""


def translate(
    argv: Sequence[str], own: Collection[str], table: Mapping[str, ForeignFlag] = FOREIGN
) -> tuple[list[str], list[str], str]:
    """Replace flags and values of other servers, which `table` has. `own`: the flags of this command, which are left alone. Returns the
    arguments, the notes to print, and why a flag is refused (empty: none is)."""
    arguments: list[str] = []
    notes: list[str] = []
    parts: dict[str, dict[str, object]] = {}  # objects given member by member
    rest = list(argv)
    while rest:
        text = rest.pop(0)
        if text == "--":
            rest.insert(0, text)
            break
        name, equals, value = text.partition("=")
        if name.startswith("-O") and not name.startswith("-O."):  # -O3, -O 3, -O=3
            name, equals, value = ("-O", "=", name[2:]) if name != "-O" else (name, equals, value)
        if (ours := _CPP_SAMPLING.get(name, "")) in own:
            arguments.append(ours + equals + value)
            continue
        name, member = (name, "") if name in table else _split_member(name)
        if member and (whole := name if name in own else table[name].ours if name in table else ""):
            if not equals and (not rest or not _is_value(rest[0])):
                return arguments, notes, f"{name}.{member} needs a value"
            if not _set_member(parts.setdefault(whole, {}), member, value if equals else rest.pop(0)):
                return (
                    arguments,
                    notes,
                    f"{name}.{member[:60]} goes through more than {MAX_MEMBER_DEPTH} objects: give one JSON object",
                )
            continue
        negated = name not in table and name.startswith("--no-") and "--" + name[5:] in table
        flag = table.get("--" + name[5:] if negated else name)
        if name in own or flag is None:
            arguments.append(text)
            continue
        if flag.takes_value and not negated and not equals and rest and _is_value(rest[0]):
            value = rest.pop(0)
        if member:
            value = json.dumps({member: value})
        if negated and flag.ours:
            inverse = "--" + flag.ours[5:] if flag.ours.startswith("--no-") else "--no-" + flag.ours[2:]
            if flag.takes_value or inverse not in own:
                return arguments, notes, f"there is no flag {name}: leave {name.replace('--no-', '--', 1)} out"
            arguments.append(inverse)
        elif flag.member:
            if not value:
                return arguments, notes, f"{name} needs a value"
            _set_member(parts.setdefault(flag.ours, {}), flag.member, value)
        elif flag.ours:
            arguments += [flag.ours, value] if flag.takes_value and (equals or value) else [flag.ours]
        elif flag.note and (negated or flag.is_harmless(value)):
            notes.append(f"{name} has no effect: {flag.note}")
        elif negated:
            notes.append(f"{name} has no effect: {flag.why}")
        else:
            shown = f" {value}" if flag.fate == "no effect for some values" else ""
            return arguments, notes, f"{name}{shown} is not offered: {flag.why}"
    for name, given in parts.items():
        if any(text.partition("=")[0] == name for text in arguments):
            return (
                arguments,
                notes,
                f"{name} is given whole and by its members ({name}.{next(iter(given))}): choose one",
            )
        arguments += [name, json.dumps(given)]
    return [*_with_own_values(arguments, notes), *rest], notes, ""


def _split_member(name: str) -> tuple[str, str]:
    """`--hf-overrides.rope_theta` → its flag and the member of the JSON object. A name without a dot has no member."""
    flag, dot, member = name.partition(".")
    return (flag.replace("_", "-"), member) if dot and flag.startswith("-") else (name, "")


def _set_member(given: dict[str, object], path: str, text: str) -> bool:
    """Set a member of an object to a value that is JSON, or else text. False: it is too deep."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    *outer, last = path.split(".")
    if len(outer) > MAX_MEMBER_DEPTH:
        return False
    for key in outer:
        inner = given.setdefault(key, {})
        if not isinstance(inner, dict):
            inner = given[key] = {}
        given = inner
    given[last] = value
    return True


def translate_options(options: Mapping[str, object], own: Collection[str]) -> tuple[dict[str, object], list[str], str]:
    """Do the same for keyword arguments of the Python LLM. `own`: the names of our options. A value that asks for nothing (None, False,
    0, an empty text or mapping) of another server's option is left out without a word; None of any option means its default."""
    found: dict[str, object] = {}
    notes: list[str] = []
    for name, value in options.items():
        dashed = "--" + name.replace("_", "-")
        flag = FOREIGN.get(dashed)
        if name in own or flag is None:
            if value is not None or name not in own:
                values = VALUES.get(dashed, {}) if isinstance(value, str) else {}
                ours, reason = values.get(str(value).lower(), (value, ""))
                found[name] = ours
                notes += [f"{name}={value!r} means {ours!r} here: {reason}"] if reason else []
        elif flag.ours.startswith("--no-"):
            found[flag.ours[5:].replace("-", "_")] = not value
        elif flag.ours and not flag.member:
            found[flag.ours[2:].replace("-", "_")] = value
        elif not value:
            continue
        elif flag.note and flag.is_harmless(value):
            notes.append(f"{name} has no effect: {flag.note}")
        else:
            return found, notes, f"{name}={value!r} is not offered: {flag.why}"
    return found, notes, ""


def _with_own_values(argv: Sequence[str], notes: list[str]) -> list[str]:
    arguments = list(argv)
    for at, text in enumerate(arguments):
        name, equals, value = text.partition("=")
        values = VALUES.get(name, {})
        place = at if equals else at + 1
        given = value if equals else arguments[place] if place < len(arguments) else ""
        if given.lower() in values:
            ours, reason = values[given.lower()]
            arguments[place] = f"{name}={ours}" if equals else ours
            if reason:
                notes.append(f"{name} {given} means {ours} here: {reason}")
    return arguments


def _is_value(text: str) -> bool:
    """Whether the next argument is the flag's value: not another flag; negative numbers are values."""
    return not text.startswith("-") or text[1:2].isdigit()
