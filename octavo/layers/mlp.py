"""Feed-forward networks: gated (Llama) and plain (GPT-2). The inner width is split over ranks.
Knows nothing of where in a model it stands."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext
from octavo.layers.linear import ColumnLinear, RowLinear


def _silu(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x, inplace=True)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": _silu,
    "swish": _silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not supported; the supported ones are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


class GatedMLP(nn.Module):
    """residual + down(act(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, hidden_size: int, inner_size: int, act: str, context: BuildContext, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = ColumnLinear(hidden_size, (inner_size, inner_size), context, bias=bias)
        self.down = RowLinear(inner_size, hidden_size, context, bias=bias)
        self._activation = activation(act)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down(self._activation(gate) * up, residual)
        return out


class MLP(nn.Module):
    """residual + down(act(up(x)))."""

    def __init__(self, hidden_size: int, inner_size: int, act: str, context: BuildContext, bias: bool = True) -> None:
        super().__init__()
        self.up = ColumnLinear(hidden_size, (inner_size,), context, bias=bias)
        self.down = RowLinear(inner_size, hidden_size, context, bias=bias)
        self._activation = activation(act)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        inner = self.up(x, "gelu_tanh") if self._activation is _gelu_tanh else self._activation(self.up(x))
        out: torch.Tensor = self.down(inner, residual)
        return out
