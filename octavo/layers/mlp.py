"""Feed-forward networks: gated (Llama) and plain (GPT-2). The inner width is split over ranks."""

import torch
from torch import nn

from octavo.errors import ConfigError
from octavo.kernels.device_ops import Activation
from octavo.layers.context import BuildContext
from octavo.layers.linear import ColumnLinear, RowLinear
from octavo.layers.norm import Norm

# By the names that a config.json has for them.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def activation(name: str) -> Activation:
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
        self.gate_up = ColumnLinear(hidden_size, (inner_size, inner_size), context, bias=bias, is_gated=True)
        self.down = RowLinear(inner_size, hidden_size, context, bias=bias)
        self._activation = activation(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden], which may be changed."""
        if self.output_norm is not None:
            return self.output_norm.added(self._product(x, None), x)
        return self._product(x, x)

    def _product(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        inner = self.gate_up.gated(x, self.norm, self._activation)
        if inner is None:
            return self.down.after_gate(self.gate_up(x, self.norm), self._activation, residual)
        out: torch.Tensor = self.down(inner, residual)
        return out

    def warm_up(self, max_rows: int) -> None:
        """Inside a warm-up: compile the kernels that are used only for certain numbers of rows."""
        self.gate_up.warm_up_gate(self._activation, max_rows)


def warm_up_gates(model: nn.Module, max_rows: int) -> None:
    """Inside a warm-up: compile the gates' kernels for steps of up to `max_rows` tokens."""
    # Layers of one shape take the same kernels.
    mlps = (module for module in model.modules() if isinstance(module, GatedMLP))
    for mlp in {mlp.gate_up.request: mlp for mlp in mlps}.values():
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden], which may be changed."""
        out: torch.Tensor = self.down(self.inner(x), x)
        return out

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """act(up(norm(x))) [T, inner / ranks]; x stays as it is, for families that add the rest to something else."""
        inner: torch.Tensor = self.up(x, self.norm, self._activation)
        return inner
