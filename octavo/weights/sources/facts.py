"""ModelFacts: what a model's files say about it, read from headers only: format, architecture, parameters, quantisation."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.gguf import GGUFFile, part_paths
from octavo.weights.sources.folder import CONFIG, read_config

MAX_HEADER_BYTES = 100 * 2**20  # of a safetensors file
MAX_LIST_LEN = 16  # entries of a metadata list that is shown
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip
"""llama.cpp's numbers in general.file_type."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    format: str  # gguf or safetensors
    family: str  # llama, qwen3, …
    num_parameters: int
    quantization: str  # Q4_K_M, BF16, awq, …; empty: unknown
    num_bytes: int  # of the weights' files
    modified: float  # time.time() of the newest of them
    metadata: dict[str, Any]  # without long lists
    license: str = ""

    @property
    def parameter_size(self) -> str:
        """As people write it: 7.6B, 135M."""
        for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
            if self.num_parameters >= size:
                number = self.num_parameters / size
                return f"{number:.0f}{unit}" if number >= 100 else f"{number:.1f}{unit}"
        return str(self.num_parameters)


def read_facts(path: Path) -> ModelFacts:
    """Raises ConfigError where the files cannot be read. `path`: a folder or a .gguf file."""
    try:
        return _folder_facts(path) if path.is_dir() else _gguf_facts(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _gguf_facts(path: Path) -> ModelFacts:
    file = GGUFFile(path)
    file.join_parts()
    metadata = file.metadata
    types: Counter[str] = Counter()
    for entry in file.tensors.values():
        types[entry.type] += entry.num_bytes
    stats = [part.stat() for part in part_paths(path)]
    quantization = _FILE_TYPES.get(metadata.get("general.file_type", -1)) or (types.most_common(1) or [("", 0)])[0][0]
    return ModelFacts(
        format="gguf",
        family=str(metadata.get("general.architecture", "")),
        num_parameters=sum(math.prod(entry.shape) for entry in file.tensors.values()),
        quantization=quantization,
        num_bytes=sum(stat.st_size for stat in stats),
        modified=max(stat.st_mtime for stat in stats),
        metadata={key: value for key, value in metadata.items() if _is_short(value)},
        license=str(metadata.get("general.license", "")),
    )


def _folder_facts(folder: Path) -> ModelFacts:
    config = read_config(folder)
    files = sorted(folder.glob("*.safetensors"))
    types: Counter[str] = Counter()
    num_parameters = 0
    for file in files:
        for entry in _safetensors_header(file):
            size = math.prod(entry["shape"])
            num_parameters += size
            types[entry["dtype"]] += size
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method", "") if isinstance(quantised, dict) else ""
    stats = [path.stat() for path in (folder / CONFIG, *files)]
    return ModelFacts(
        format="safetensors",
        family=str(config["model_type"]),
        num_parameters=num_parameters,
        quantization=str(method) or (types.most_common(1) or [("", 0)])[0][0],
        num_bytes=sum(stat.st_size for stat in stats[1:]),
        modified=max(stat.st_mtime for stat in stats),
        metadata={key: value for key, value in config.items() if _is_short(value)},
    )


def _safetensors_header(path: Path) -> list[dict[str, Any]]:
    """The entries of a file's tensors."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER_BYTES:
            raise ConfigError(f"{path} is corrupt: its header has {size} bytes; fetch it again")
        try:
            header = json.loads(file.read(size))
            entries = [entry for name, entry in header.items() if name != "__metadata__"]
            return [
                entry for entry in entries if all(isinstance(dim, int) for dim in entry["shape"]) and entry["dtype"]
            ]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path} is truncated or corrupt: fetch it again") from error


def _is_short(value: object) -> bool:
    return not isinstance(value, list) or len(value) <= MAX_LIST_LEN
