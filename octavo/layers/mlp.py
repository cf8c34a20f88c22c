"""Feed-forward networks: gated (Llama) and plain (GPT-2). The inner width is split over ranks.
Knows nothing of where in a model it stands."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.layers.linear import ColumnLinear, RowLinear
from octavo.layers.norm import Norm


def _silu(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x, inplace=True)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": _silu,
    "swish": _silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}
# The names under which kernels know them.
_FUSED = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
_FUSED |= {name: "gelu_tanh" for name, function in _ACTIVATIONS.items() if function is _gelu_tanh}
_FUSED_PLAIN = {name: fused for name, fused in _FUSED.items() if fused != "silu"} | {"relu": "relu"}  # without a gate


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not supported; the supported ones are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


class GatedMLP(nn.Module):
    """x + output_norm(down(act(gate(norm(x))) * up(norm(x)))), each norm where there is one, gate and up in one product."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        act: str,
        norm: Norm | None,
        context: BuildContext,
        bias: bool = False,
        output_norm: Norm | None = None,
    ) -> None:
        super().__init__()
        self.norm, self.output_norm = norm, output_norm
        self.gate_up = ColumnLinear(hidden_size, (inner_size, inner_size), context, bias=bias)
        self.down = RowLinear(inner_size, hidden_size, context, bias=bias)
        if context.decodes and self.gate_up.native is not None:
            self.gate_up.native.hold_as_one()  # gate and up of two kinds would not be gated by float32's own kernel
        self._activation = activation(act)
        self._fused = _FUSED.get(act, "")
        self._kernels = context.kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden], which may be changed."""
        if self.output_norm is not None:
            return self.output_norm.added(self._product(x, None), x)
        return self._product(x, x)

    def _product(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        native = self.gate_up.native
        if native is not None and native.can_gate(self._fused, self.gate_up.bias):
            return self.down(native.gated(x, self.norm, self._fused), residual)  # type: ignore[no-any-return]
        if self._kernels is None or not self._fused:
            gate, up = self.gate_up(x, self.norm).chunk(2, dim=-1)
            inner = self._activation(gate) * up
        elif self.gate_up.gates(x.shape[0], self._fused):
            inner = self.gate_up.gated(x, self.norm, self._fused)
        else:
            return self.down.after_gate(self.gate_up(x, self.norm), self._fused, residual)
        out: torch.Tensor = self.down(inner, residual)
        return out

    def warm_up(self, max_rows: int) -> None:
        """Inside a rehearsal: have the kernels compiled that only some numbers of rows take."""
        if self._fused:
            self.gate_up.warm_up_gates(max_rows, self._fused)


def warm_up_gates(model: nn.Module, max_rows: int) -> None:
    """Inside a rehearsal, for steps of up to so many tokens."""
    # Layers of one shape take the same kernels.
    mlps = (module for module in model.modules() if isinstance(module, GatedMLP))
    for mlp in {mlp.gate_up.weight.shape: mlp for mlp in mlps}.values():
        mlp.warm_up(max_rows)


class MLP(nn.Module):
    """x + down(act(up(norm(x)))); without a norm: of x itself."""

    def __init__(
        self, hidden_size: int, inner_size: int, act: str, norm: Norm | None, context: BuildContext, bias: bool = True
    ) -> None:
        super().__init__()
        self.norm = norm
        self.up = ColumnLinear(hidden_size, (inner_size,), context, bias=bias)
        self.down = RowLinear(inner_size, hidden_size, context, bias=bias)
        self._activation = activation(act)
        self._fused = _FUSED_PLAIN.get(act, "")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden], which may be changed."""
        out: torch.Tensor = self.down(self.inner(x), x)
        return out

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """act(up(norm(x))) [T, inner / ranks]; x stays as it is, for families that add the rest to something else."""
        if self._fused:
            return self.up(x, self.norm, self._fused)  # type: ignore[no-any-return]
        return self._activation(self.up(x, self.norm))
