"""A PEFT folder: adapter_config.json and adapter_model.safetensors. What would change answers and is not supported is refused by its
name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError
from octavo.weights.adapters.adapter_file import AdapterFile, Pair, Stored, check_count
from octavo.weights.formats.safetensors_files import Entry, read_entries, torch_name, torch_type

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
MAX_CONFIG_BYTES = 1 << 20
# Two matrices of each of 128 experts' three products in 48 layers, by themselves, have a header of 5.4 MB.
MAX_HEADER_BYTES = 8 << 20
_MAX_PARTS = 32  # of a module's name, between its dots: more than any model's have
_MAX_NUMBER = 1e30  # of settings
_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_PLAIN_NAME = re.compile(r"(?:\.\*\\\.)?\^?[\w.\\]+\$?")
# All experts' gate and up, and all experts' down, as one tensor each, in the order in which the model has them: PEFT wraps the module for the first,
# and what it then has for the second.
_FUSED = ("gate_up_proj", "down_proj")
_WRAPPED = re.compile(r"(?P<experts>.+\.experts)(?P<inner>(?:\.base_layer)*)")
# Settings that change what is computed, by name: what they may be, and what they are.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False, None), "DoRA"),
    "use_qalora": ((False, None), "QALoRA"),
    "lora_bias": ((False, None), "biases of adapters"),
    "bias": (("none", None), "trained biases"),
    "modules_to_save": ((None, []), "modules that are saved whole"),
    "trainable_token_indices": ((None, [], {}), "trained token embeddings"),
    "layer_replication": ((None, []), "replicated layers"),
    "alora_invocation_tokens": ((None, []), "activated LoRA"),
    "arrow_config": ((None,), "Arrow routing"),
    "megatron_config": ((None,), "Megatron's layers"),
}
# Ways to begin training after which the base's own weights are the right ones to add to.
_INIT = (True, False, None, "gaussian", "eva", "orthogonal")


class PeftAdapter(AdapterFile):
    def __init__(self, path: Path) -> None:
        self._config = config = _read_config(path)
        _check_config(path, config)
        self._file = path / WEIGHTS
        self._map: Tensor | None = None  # from the first matrix on
        self._numbers: Tensor | None = None  # from which matrices are taken instead
        if not self._file.is_file():
            raise ConfigError(_no_weights(path))
        entries = read_entries(self._file, MAX_HEADER_BYTES)
        # Tensors lie one after the other, to the end of the file.
        self._entries = dict(sorted(entries.items(), key=lambda named: named[1].offset))
        self._tensors: dict[str, dict[str, str]] = {}  # module → side → tensor
        for name in entries:
            found = _MATRIX.fullmatch(name)
            if found is None:
                raise ConfigError(f"{self._file}: {_why_not(name)}")
            module = found["module"].removeprefix(_PREFIX)
            sides = self._tensors.setdefault(module, {})
            if found["side"] in sides:
                raise ConfigError(f"{self._file} has lora_{found['side']} of {module} twice")
            sides[found["side"]] = name
        check_count(path, len(self._tensors))
        self._first = min(entry.offset for entry in entries.values())
        self._end = self._first + sum(entry.num_bytes for entry in entries.values())
        self._ranks = _Pattern(config, "rank_pattern", config["r"])
        self._alphas = _Pattern(config, "alpha_pattern", config["lora_alpha"])
        wrapped = self._fused_experts()
        pairs = {module: self._pair(module, entries) for module in sorted(self._tensors) if module not in wrapped}
        counts: dict[str, int] = {}
        self._of_experts: dict[str, tuple[str, int, int]] = {}  # name → module in the file, expert, experts
        for module, (experts, parameter) in sorted(wrapped.items()):
            name = f"{experts}.{parameter}"
            pair, count = self._expert_pair(module, name, entries)
            check_count(path, len(pairs) + count)
            counts[f"{experts}.{count}.{parameter}"] = count
            for expert in range(count):
                pairs[f"{experts}.{expert}.{parameter}"] = pair
                self._of_experts[f"{experts}.{expert}.{parameter}"] = module, expert, count
        super().__init__(path, pairs)
        self.num_experts = counts

    def _fused_experts(self) -> dict[str, tuple[str, str]]:
        """Modules of the file that are a parameter with all experts: the module's name in the model, and the parameter's."""
        wanted = self._config.get("target_parameters") or []
        if not wanted:
            return {}
        depths: dict[str, dict[int, str]] = {}  # the experts' module → how deep it is wrapped → the module in the file
        for module in self._tensors:
            if (found := _WRAPPED.fullmatch(module)) is not None:
                depths.setdefault(found["experts"], {})[found["inner"].count(".")] = module
        found_ones: dict[str, tuple[str, str]] = {}
        for experts, by_depth in depths.items():
            targeted = [
                one for one in _FUSED if any(f".{experts}.{one}".endswith(f".{each.lstrip('.')}") for each in wanted)
            ]
            if sorted(by_depth) != list(range(len(targeted))):
                raise ConfigError(
                    f"{self._file}: {experts} has {len(by_depth)} parameters, and target_parameters of {CONFIG} names {len(targeted)} of "
                    f"{' and '.join(_FUSED)}: they do not belong together"
                )
            # The first is wrapped first, so it is deepest.
            for depth, parameter in enumerate(reversed(targeted)):
                found_ones[by_depth[depth]] = experts, parameter
        return found_ones

    @property
    def base(self) -> str:
        return str(self._config.get("base_model_name_or_path") or "")

    @property
    def places(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, entry.type, entry.shape) for name, entry in self._entries.items()]

    def contents(self) -> Iterator[memoryview]:
        yield self._mapped()[self._first :].numpy().data

    @property
    def stored(self) -> Stored | None:
        types = {entry.type for entry in self._entries.values()}
        if len(types) > 1:
            return None
        (entry, *_) = self._entries.values()
        return Stored(self._file, self._first, self._end - self._first, torch_name(entry))

    def take_from(self, numbers: Tensor) -> None:
        self._numbers = numbers

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        module, expert, count = self._of_experts.get(name, (name, 0, 0))
        sides = self._tensors[module]
        down, up = self._tensor(sides["A"]), self._tensor(sides["B"])
        if not count:
            return down, up
        # A [experts · rank, in], an expert after the other; B [out, rank · experts], the experts of a rank's number beside each other.
        return down.view(count, -1, down.shape[1])[expert], up.view(up.shape[0], -1, count)[:, :, expert]

    def _tensor(self, name: str) -> Tensor:
        """A view. A reader's own work for each would take longer: there are hundreds of them."""
        entry = self._entries[name]
        if self._numbers is not None:
            size = entry.num_bytes // math.prod(entry.shape)
            start = (entry.offset - self._first) // size
            return self._numbers[start : start + math.prod(entry.shape)].view(entry.shape)
        dtype = torch_type(entry)
        found = self._mapped()[entry.offset : entry.offset + entry.num_bytes]
        if entry.offset % dtype.itemsize:
            found = found.clone()  # writers need not align what they write
        return found.view(dtype).view(entry.shape)

    def _mapped(self) -> Tensor:
        """The file's bytes."""
        if self._map is None:
            import torch

            self._map = torch.from_file(str(self._file), shared=False, size=self._end, dtype=torch.uint8)
        return self._map

    def _expert_pair(self, module: str, name: str, entries: dict[str, Entry]) -> tuple[Pair, int]:
        """One expert's matrices, and how many experts there are. `name`: of the parameter."""
        all_ranks, in_features, out_features = self._shapes(module, entries)
        rank = int(self._ranks.of(name))
        if rank < 1 or all_ranks % rank:
            raise ConfigError(
                f"{self._file}: {name} has {all_ranks} rows in lora_A, and {CONFIG} says rank {rank}: they do not belong together"
            )
        return Pair(rank, in_features, out_features, self._scale(name, rank)), all_ranks // rank

    def _pair(self, module: str, entries: dict[str, Entry]) -> Pair:
        rank, in_features, out_features = self._shapes(module, entries)
        expected = int(self._ranks.of(module))
        if rank != expected:
            raise ConfigError(
                f"{self._file}: {module} has rank {rank}, and {CONFIG} says {expected}: they do not belong together"
            )
        return Pair(rank, in_features, out_features, self._scale(module, rank))

    def _scale(self, module: str, rank: int) -> float:
        alpha = float(self._alphas.of(module))
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _shapes(self, module: str, entries: dict[str, Entry]) -> tuple[int, int, int]:
        """The rows of A, which are the columns of B; the columns of A; the rows of B."""
        sides = self._tensors[module]
        if len(sides) != 2:
            raise ConfigError(f"{self._file} has only lora_{next(iter(sides))} of {module}: it is incomplete")
        down, up = entries[sides["A"]], entries[sides["B"]]
        for side, entry in (("A", down), ("B", up)):
            if len(entry.shape) != 2 or not all(entry.shape) or not entry.arithmetic:
                raise ConfigError(
                    f"{self._file}: lora_{side} of {module} is {entry.type} {list(entry.shape)}; a matrix of floats is expected"
                )
        rank = down.shape[0]
        if up.shape[1] != rank:
            raise ConfigError(
                f"{self._file}: {module} has {rank} rows in lora_A and {up.shape[1]} columns in lora_B: both are its rank"
            )
        return rank, down.shape[1], up.shape[0]


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(f"{folder} holds no {CONFIG}: pass a PEFT folder, or a GGUF file")
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} has more than {MAX_CONFIG_BYTES} bytes: it is not an adapter's configuration")
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {str(error)[:100]}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must be a JSON object")
    return config


def _check_config(folder: Path, config: dict[str, Any]) -> None:
    path = folder / CONFIG
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type is {_shown(config.get('peft_type'))}; only LORA is supported")
    for key, (allowed, what) in _REFUSED.items():
        if config.get(key) not in allowed:
            raise ConfigError(f"{path}: {key} is {_shown(config[key])}: {what} ({key}) are not supported")
    if config.get("init_lora_weights") not in _INIT:
        raise ConfigError(
            f"{path}: init_lora_weights is {_shown(config['init_lora_weights'])}, which changes the base's weights: save the adapter "
            "converted to plain LoRA (path_initial_model_for_weight_conversion)"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"{path}: r is {_shown(rank)}; it must be a whole number of at least 1")
    if not _is_number(alpha):
        raise ConfigError(f"{path}: lora_alpha is {_shown(alpha)}; it must be a number")
    targeted = config.get("target_parameters") or []
    if not isinstance(targeted, list) or not all(isinstance(name, str) for name in targeted):
        raise ConfigError(f"{path}: target_parameters must be a list of names")
    for name in targeted:
        if name.rsplit(".", 1)[-1] not in _FUSED:
            raise ConfigError(
                f"{path}: target_parameters has {_shown(name)}: of bare parameters, only experts' {' and '.join(_FUSED)} are supported"
            )
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict) or not all(map(_is_number, pattern.values())):
            raise ConfigError(f"{path}: {key} must be an object of numbers")
        for name in pattern:
            if not _PLAIN_NAME.fullmatch(name):
                raise ConfigError(f"{path}: {key} has {_shown(name)}: only names of modules are supported there")


class _Pattern:
    """rank_pattern or alpha_pattern: the value of the first name that a module's ends with. Looked up by the endings of the module's name: a
    file may have many thousands of both."""

    def __init__(self, config: dict[str, Any], key: str, otherwise: Any) -> None:
        self._otherwise = otherwise
        self._whole: dict[str, tuple[int, Any]] = {}  # names that begin with ^ → their place, and the value
        self._ends: dict[str, tuple[int, Any]] = {}
        for place, (name, value) in enumerate((config.get(key) or {}).items()):
            plain = name.removeprefix(r".*\.").replace("\\", "").removesuffix("$")
            names = self._whole if plain.startswith("^") else self._ends
            names.setdefault(plain.removeprefix("^"), (place, value))

    def of(self, module: str) -> Any:
        found = [self._whole[module]] if module in self._whole else []
        if self._ends:
            parts = module.split(".")[-_MAX_PARTS:]
            ends = (".".join(parts[at:]) for at in range(len(parts)))
            found += [self._ends[end] for end in (*ends, module) if end in self._ends]
        return min(found, key=lambda one: one[0])[1] if found else self._otherwise


def _is_number(value: object) -> bool:
    """Whether it is a finite number within what a float holds: JSON's integers have no end."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER


def _why_not(name: str) -> str:
    shown = _shown(name)
    if "lora_magnitude_vector" in name:
        return f"{shown} belongs to DoRA (use_dora), which is not supported"
    if "lora_embedding_" in name:
        return f"{shown} changes an embedding; adapters of attention and MLP are supported"
    if "modules_to_save" in name or not ("lora_A" in name or "lora_B" in name):
        return f"{shown} is a module that is saved whole (modules_to_save), which is not supported"
    return f"{shown} is not a matrix of a LoRA adapter"


def _no_weights(folder: Path) -> str:
    if (folder / _PICKLE).is_file():
        return (
            f"{folder} holds pickled weights ({_PICKLE}), which can run code when they are read: save {WEIGHTS} instead"
        )
    return f"{folder} holds no {WEIGHTS}"


def _shown(value: object) -> str:
    return repr(value)[:80]
