"""Measures the host's memory while a sharded checkpoint is loaded, by format: the memory held afterwards, and the peak.
load_weights.py measures the speed.

    python -m benchmarks.load_memory [GB] [folder]     # 2 GB as 16-bit weights, in the folder for temporary files
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, VOCAB = 2048, 5632, 16, 8192
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER  # weights
CONFIG = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "vocab_size": VOCAB, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"} | {
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
SETTINGS = {
    "bfloat16": None,
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "fp8": {"quant_method": "fp8"},
}
MiB = 2**20


def parts(kind: str, module: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    num_rows, width = shape
    match kind:
        case "gptq":
            groups = width // 128
            return {
                f"{module}.qweight": torch.randint(-(2**31), 2**31, (width // 8, num_rows), dtype=torch.int32),
                f"{module}.qzeros": torch.full((groups, num_rows // 8), 0x77777777, dtype=torch.int32),
                f"{module}.scales": torch.full((groups, num_rows), 0.002, dtype=torch.float16),
            }
        case "fp8":
            numbers = torch.randn(shape).to(torch.float8_e4m3fn)
            return {f"{module}.weight": numbers, f"{module}.weight_scale": torch.tensor(0.02)}
        case _:
            return {f"{module}.weight": (torch.randn(shape) * 0.02).bfloat16()}


def write(folder: Path, kind: str, num_layers: int) -> int:
    """Write one file per layer and one for the rest. Return the bytes of the largest."""
    settings = {"quantization_config": SETTINGS[kind]} if SETTINGS[kind] else {}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers} | settings))
    for layer in range(num_layers):
        tensors = {
            f"model.layers.{layer}.{name}_layernorm.weight": torch.ones(HIDDEN) for name in ("input", "post_attention")
        }
        for name, shape in SHAPES.items():
            tensors |= parts(kind, f"model.layers.{layer}.{name}", shape)
        save_file(tensors, folder / f"model-{layer + 1:05}-of-{num_layers + 1:05}.safetensors")
    others = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN).bfloat16(),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    save_file(others, folder / f"model-{num_layers + 1:05}-of-{num_layers + 1:05}.safetensors")
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


def status(*names: str) -> list[int]:
    """Return these values of /proc/self/status, in MiB."""
    found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(found[name].split()[0]) >> 10 for name in names]


def load(folder: str) -> None:
    """Load in a process of its own and print MiB: at the start, held afterwards, and the peaks of private and of all memory."""
    from octavo.config import Config, replace
    from octavo.weights.sources.source import local
    from octavo.worker.load import Loader

    loader = Loader(replace(Config(), device="cpu", cpu_threads=1), local(Path(folder)))
    start = status("RssAnon")[0]
    peaks, is_done = [0, 0], threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            private, files = status("RssAnon", "RssFile")
            peaks[:] = max(peaks[0], private), max(peaks[1], private + files)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    report = loader.load()
    is_done.set()
    watcher.join()
    print(json.dumps({"start": start, "held": report.weights_bytes >> 20, "private": peaks[0], "all": peaks[1]}))


def main(gigabytes: float, parent: str | None) -> None:
    num_layers = max(2, int(gigabytes * 1e9 / 2 / LAYER))
    for kind in SETTINGS:
        with tempfile.TemporaryDirectory(dir=parent) as name:
            shard = write(Path(name), kind, num_layers) // MiB
            command = [sys.executable, "-m", "benchmarks.load_memory", "--load", name]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            beyond, everything = (found[peak] - found["start"] - found["held"] for peak in ("private", "all"))
            print(
                f"{kind:9} {num_layers} files of {shard} MiB: {found['held']} MiB of weights are held; while loading "
                f"at most {beyond} MiB more of private memory, {everything} MiB with mapped files and libraries"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--load"]:
        load(sys.argv[2])
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 2.0, sys.argv[2] if len(sys.argv) > 2 else None)
