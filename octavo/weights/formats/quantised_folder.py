"""Read quantised safetensors files as the weights that an unquantised checkpoint would hold. A method in quantised/
plans which tensors belong together and how they make a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError
from octavo.weights.formats.quantised import Recipe, plan_load
from octavo.weights.formats.safetensors_files import QUANTISED_TYPES, SafetensorsFiles, all_wanted

if TYPE_CHECKING:
    import torch

    from octavo.quants import Quants, QuantSizes, Weight

_AT_ONCE = 1 << 24  # weights decoded together


class QuantisedFiles:
    """A reader of quantised weights. `files` were opened with is_quantised; `settings` is config.json's quantization_config."""

    def __init__(self, files: SafetensorsFiles, settings: Any) -> None:
        self._files = files
        self._plan = plan_load(settings, files.entries, files.small)
        self.packing_label = self._plan.about
        self.num_bytes = files.num_bytes
        self.stored_dtype = files.stored_dtype
        self.packed_types = frozenset(recipe.held_as for recipe in self._plan.recipes if recipe.held_as)
        self._recipe_of: dict[str, Recipe] = {}
        for recipe in self._plan.recipes:
            if recipe.name in files.entries and recipe.name not in recipe.parts.values():
                raise ConfigError(f"the checkpoint holds {recipe.name} twice, quantised and not: keep one of them")
            self._recipe_of |= dict.fromkeys(recipe.parts.values(), recipe)
        for name, entry in files.entries.items():
            if entry.type in QUANTISED_TYPES and self._is_plain(name):
                raise ConfigError(
                    f"tensor {name} is stored as {entry.type}, which {self.packing_label} does not account for: "
                    "config.json and weights do not belong together"
                )

    def held_bytes(self, itemsize: int, sizes: QuantSizes) -> int:
        from octavo.quants.exact import held_bytes

        plain = sum(math.prod(entry.shape) for name, entry in self._files.entries.items() if self._is_plain(name))
        made = sum(
            held_bytes(recipe.held_as, math.prod(recipe.shape), itemsize, sizes) for recipe in self._plan.recipes
        )
        return plain * itemsize + made

    def tensors(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        keep_packed: bool = False,
        is_wanted: Callable[[str], bool] = all_wanted,
    ) -> Iterator[tuple[str, Weight]]:
        """Yield (name, weight). A weight is made once its last part is read; parts lie side by side, so few are held at a
        time."""
        import torch

        if str(device) == "meta":
            yield from self._outlines(dtype)
            return
        waiting: dict[str, dict[str, torch.Tensor]] = {}  # weight → names and tensors of its parts
        for name, tensor in self._files.stored(device, lambda name: is_wanted(self._made_of(name))):
            recipe = self._recipe_of.get(name)
            if recipe is None:
                if name not in self._plan.unused:
                    yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
                continue
            parts = waiting.setdefault(recipe.name, {})
            parts[name] = tensor
            if len(parts) == len(recipe.parts):
                del waiting[recipe.name]
                made = recipe.make({part: parts[name] for part, name in recipe.parts.items()}, keep_packed)
                if isinstance(made, torch.Tensor):
                    yield recipe.name, made.to(dtype)
                else:
                    yield recipe.name, made if keep_packed else _decoded(made, dtype)
        assert not waiting, "every part was in the headers"

    def _made_of(self, name: str) -> str:
        """The weight that a tensor is a part of."""
        recipe = self._recipe_of.get(name)
        return name if recipe is None else recipe.name

    def _outlines(self, dtype: torch.dtype) -> Iterator[tuple[str, Weight]]:
        import torch

        for name, tensor in self._files.tensors("meta", dtype):
            if self._is_plain(name):
                yield name, tensor
        for recipe in self._plan.recipes:
            yield recipe.name, torch.empty(recipe.shape, dtype=dtype, device="meta")

    def _is_plain(self, name: str) -> bool:
        return name not in self._recipe_of and name not in self._plan.unused


def _decoded(weight: Quants, dtype: torch.dtype) -> torch.Tensor:
    """Decode some rows at a time, so that only those are held in float32."""
    import torch

    decoded = torch.empty(weight.shape, dtype=dtype, device=weight.stored.device)
    step = max(1, _AT_ONCE // weight.shape[1])
    for first in range(0, len(decoded), step):
        count = min(step, len(decoded) - first)
        decoded[first : first + count] = weight.narrow_rows(first, count).dequantise()
    return decoded
