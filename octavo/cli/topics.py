"""The texts of `octavo help TOPIC`: environment variables, settings, values and exit codes. The documentation is made from, or compared with,
the same tables."""

import dataclasses
from collections.abc import Callable, Iterator

from octavo.cli.settings import variable_of
from octavo.config import sections

ENVIRONMENT: dict[str, dict[str, str]] = {
    "Octavo's own": {
        "OCTAVO_API_KEY": "the server's API keys, separated by commas, where `--api-key` is not given; the key that `octavo chat`, "
        "`complete`, `top` and `bench serve` send",
        "VLLM_API_KEY": "the same for the server, where `OCTAVO_API_KEY` is not set",
        "OCTAVO_ADMIN_KEY": "the server's admin keys, separated by commas, where `--admin-key` is not given",
        "OCTAVO_CACHE": "the cache folder: the embedded model, models that were pulled, native kernels built at a start, recordings, the "
        "history of `octavo chat`",
        "OCTAVO_NATIVE": "`0`: do not use the native CPU kernels; torch computes in their place",
        "OCTAVO_PLAIN_LAUNCH": "`1`: launch Triton kernels by Triton's own launcher, to compare",
    },
    "Of the hub": {
        "HF_TOKEN": "the hub's token, for models that need one; read by huggingface_hub, as its other `HF_…` variables are",
        "HF_TOKEN_PATH": "the file with the token, where `HF_TOKEN` is not set",
        "HF_ENDPOINT": "the hub's address, for a mirror; else `https://huggingface.co`",
        "HF_HOME": "the folder of the hub's library; models are in `hub/` in it (`~/.cache/huggingface`)",
        "HF_HUB_CACHE": "the folder for downloaded models, where it is not `hub/` in `HF_HOME`; `--download-dir` sets it",
        "HF_HUB_OFFLINE": "`1`: use downloaded models only, and never ask the hub",
    },
    "Read from the system": {
        "XDG_CACHE_HOME": "parent of the cache folder where `OCTAVO_CACHE` is not set; else `~/.cache`",
        "CXX": "the C++ compiler for the native CPU kernels",
        "CC": "the C compiler that Triton uses; `octavo doctor` looks for it",
        "CUDA_HOME": "where flashinfer looks for CUDA's compiler",
        "CUDA_PATH": "the same, where `CUDA_HOME` is not set",
        "NO_COLOR": "no colours in `octavo top`, and neither colours nor Markdown in `octavo chat`",
        "TZ": "the time zone, for templates that write the date; passed on to the processes that render a request's own",
        "TERM": "no colours in `octavo top` where it is empty or `dumb`, nor in `octavo chat` where it is `dumb`",
        "PYTHONPATH": "passed on to worker processes, with the package's folder added",
    },
    "Set where they are not set": {
        "GOMP_SPINCOUNT": "how long idle compute threads spin before they sleep (5000): a bounded spin keeps a quiet machine fast and "
        "a crowded one alive",
        "OMP_NUM_THREADS": "one thread in the processes that compute grammars' masks",
        "OPENBLAS_NUM_THREADS": "the same",
        "GLOO_SOCKET_IFNAME": "the loopback interface for the ranks of one machine; for ranks that a launcher starts, that of their connection to the engine",
        "NCCL_SOCKET_IFNAME": "the same, for GPUs, where a launcher starts ranks",
        "OCTAVO_AGENT_SECRET": "an agent on the node of a cluster finds the secret of its replica here, and removes it",
        "OCTAVO_CLOCK_OFFSET_NS": "nanoseconds by which the clock of a node is ahead of the server; set by the agent",
        "RAY_ADDRESS": "the Ray cluster, where `--ray-address` is not given",
        "RAY_TMPDIR": "where Ray leaves the address of the cluster of this machine (`/tmp`)",
        "RAY_AUTH_MODE": "`token`, for the head of a Ray cluster that `octavo serve` starts",
        "RAY_AUTH_TOKEN": "the token of the cluster; read by Ray, as its other `RAY_…` variables are",
        "OCTAVO_RANK_SECRET": "a rank that a launcher starts finds its engine's secret here, and removes it",
    },
}
OF_OTHERS = {
    "HTTPS_PROXY": "a proxy for downloads, with `HTTP_PROXY` and `NO_PROXY`",
    "CUDA_VISIBLE_DEVICES": "the GPUs to use, by number; empty: none",
    "TRITON_CACHE_DIR": "where Triton keeps compiled kernels between starts",
    "TMPDIR": "where sockets of the server's processes and temporary files are made (`/tmp`)",
    "OTEL_EXPORTER_OTLP_HEADERS": "headers for the collector of `--otlp-traces-endpoint`; read by OpenTelemetry, as its other `OTEL_…` "
    "variables are",
}
OF_MAKE = {
    "ARGS": "for `octavo`, in `make serve` and others",
    "PYTHON": "the Python (3.11 to 3.13) to make the environment with",
    "PIP_ARGS": "passed on to every `pip install`",
    "PYTEST_ARGS": "passed on to pytest",
    "TEST_PROCESSES": "processes that run tests (2); `0`: pytest's own alone, for a debugger",
    "OCTAVO_TEST_MODELS": "a folder of downloaded models for tests that want real ones; they are skipped without it",
    "OCTAVO_PYTHON": "the Python whose Octavo serves the tests of clients; set by `make test-clients`",
}
SETTINGS = (
    "Every flag of `octavo serve` is also a variable: `--max-model-len 8k` is `OCTAVO_MAX_MODEL_LEN=8k`, and a switch is `1` or `0`.",
    "`--config FILE` reads flags from a YAML file. A flag comes before a variable, a variable before the file, and the file before the "
    "default.",
    "A variable that begins with `OCTAVO_` and is not known is named at the start.",
)
SETTINGS_EXAMPLE = (
    "model: org/model",
    "max-model-len: 8k",
    "enable-prefix-caching: false",
    "served-model-name: my-model",
)
VALUES = (
    "Flags are written in full, `_` and `-` are the same in a name, and an unknown flag is an error that names the nearest one.",
    "Counts take `k` and `m` (`8k` is 8192), sizes take `K`, `M`, `G` and `T` (powers of 1024: `512M`, `1.5G`, `2GiB`).",
    "A switch `--name` has a `--no-name`. Lists are `a,b`, or a JSON list.",
)
EXIT_CODES = (
    ("0", "stopped by SIGTERM or SIGINT, every request was finished", "done"),
    (
        "1",
        "gave up: engines failed too often, or the first did not start in time",
        "failed; `doctor --determinism`, `replay`: something differs; `run-batch`: stopped before the end; `scale`: it did not come to what was asked; `plan`: the service levels are missed",
    ),
    (
        "2",
        "a mistake at start-up, in one line on standard error",
        "the same; `doctor`: the model would not serve, or the machine is not ready",
    ),
    ("3", "stopped by SIGTERM, some requests were cut off", "`run-batch`: some answers are errors"),
    ("130", "a second SIGTERM or SIGINT ended it at once", "interrupted"),
    ("141", "", "the reader of its output is gone"),
)


def flag_variables() -> Iterator[tuple[str, str]]:
    """(flag, variable) of every option of the server that a variable can set."""
    for _, cls in sections():
        for knob in dataclasses.fields(cls):
            flag = str(knob.metadata["flag"] or knob.name.replace("_", "-")).split(",")[0]
            yield "--model" if flag == "MODEL" else f"--{flag}", variable_of(knob)


def _environment() -> Iterator[str]:
    for title, names in {**ENVIRONMENT, "Read by what Octavo stands on": OF_OTHERS, "For make": OF_MAKE}.items():
        yield f"{title}:"
        for name, text in names.items():
            yield f"  {name}: {text}"
        yield ""
    yield "Flags as variables:"
    yield "  " + ", ".join(variable for _, variable in flag_variables())


def _settings() -> Iterator[str]:
    yield from SETTINGS
    yield ""
    yield from (f"    {line}" for line in SETTINGS_EXAMPLE)


def _exit_codes() -> Iterator[str]:
    for code, serve, others in EXIT_CODES:
        yield f"  {code}: " + "; ".join(
            part for part in (f"serve: {serve}" if serve else "", f"other commands: {others}") if part
        )


TOPICS: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "environment": ("environment variables", _environment),
    "settings": ("flags, variables and files, and which comes first", _settings),
    "values": ("how counts, sizes, switches and lists are written", lambda: iter(VALUES)),
    "exit-codes": ("what a command ends with", _exit_codes),
}
"""Topics by name: what they are about, and their lines. Text between backticks is code."""
