"""Feed-forward layers and their activations."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from fairlead_worker.model.fused.library import DTYPES, Library
from fairlead_worker.model.layers.stack import Projections, Stack
from fairlead_worker.model.lowbit.linear import Fp8Linear
from fairlead_worker.sharding.group import Summed
from fairlead_worker.sharding.shards import AnyCut, Ranks

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "silu": functional.silu,
}
"""By their names in config.json."""
KERNELS = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_new": "gelu_tanh_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul"}
"""Name of an activation -> FlashInfer's function of it and the product."""


class Xielu(nn.Module):
    """xIELU (Huang and Schlag 2024): a parabola to the right of zero, an exponential to the left, both with learned factors."""

    beta: torch.Tensor
    eps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.register_buffer("beta", torch.tensor(0.5))
        self.register_buffer("eps", torch.tensor(-1e-6))

    @property
    def factors(self) -> torch.Tensor:
        """Return [3] float32: of the parabola, of the exponential, and of x itself."""
        beta = self.beta.float().reshape(1)
        return torch.cat((functional.softplus(self.alpha_p.float()), beta + functional.softplus(self.alpha_n.float()), beta))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        right, left, slope = self.factors.to(states.dtype)
        curved = torch.expm1(torch.minimum(states, self.eps.to(states.dtype))) - states
        answer: torch.Tensor = torch.where(states > 0, right * states * states, left * curved) + slope * states
        return answer


class MlpNames(NamedTuple):
    """Names of the matrices of an MLP in checkpoints."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stack: str = "gate_up_proj"
    """Of the one matrix of gate and up, if there is one."""


LLAMA = MlpNames()


class GatedMlp(Projections):
    """down(activation(gate(x)) * up(x)) (SwiGLU, Shazeer 2020)."""

    kernels: Library | None = None
    """Computes the activation of 16 bits and the product in one kernel, on a GPU."""

    def __init__(
        self,
        width: int,
        inner: int,
        activation: str,
        bias: bool = False,
        stacked: bool = False,
        names: MlpNames = LLAMA,
        gate_factor: float = 1.0,
        down_factor: float = 1.0,
    ) -> None:
        """gate_factor: of the gate before its activation. down_factor: of the output (Falcon-H1)."""
        super().__init__()
        self.gate_factor, self.down_factor = gate_factor, down_factor
        self.STACK, self.PARTS, self.DOWN = names.stack, (names.gate, names.up), names.down
        self.add_projections(width, [inner, inner], bias, stacked)
        self.add_module(self.DOWN, nn.Linear(inner, width, bias))
        self.activation = activation

    def divide(self, ranks: Ranks) -> dict[str, AnyCut]:
        """Keep a rank's inner values; return the parts of its tensors, by name. Raises Unshardable."""
        inner = self.sizes[0]
        each = ranks.share(inner, "inner values")
        span = ranks.rank * each, (ranks.rank + 1) * each
        return {**self.divide_projections([span, span]), self.DOWN: ranks.cut(inner, dim=1)}

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return [T, width] for states [T, width]."""
        out: torch.Tensor = getattr(self, self.DOWN)(self._activate(states))
        return out if self.down_factor == 1 else out * self.down_factor

    def _activate(self, states: torch.Tensor) -> Any:
        """Return [T, inner], or its rounded form for a last layer that multiplies float8."""
        if self.whole is None or self.kernels is None or states.dtype not in DTYPES or self.gate_factor != 1:
            gate, up = self.project(states)
            return ACTIVATIONS[self.activation](gate if self.gate_factor == 1 else gate * self.gate_factor) * up
        both, name = self.multiply(states), KERNELS[self.activation]
        if (down := self._rounding) is not None:
            return down.rounder.gated(both, name)
        return getattr(self.kernels, name)(both)

    @property
    def matrices(self) -> tuple[Any, Any]:
        """Return the one matrix of gate and up, None if they are separate, and the last layer."""
        whole = self.whole
        return whole.linear if isinstance(whole, Stack) else whole, getattr(self, self.DOWN)

    @property
    def _rounding(self) -> Fp8Linear | None:
        """Return the last layer if it takes rounded inputs, and no hook or other forward (`fixed_rows`) reads them in this step."""
        down: Any = getattr(self, self.DOWN)
        last: nn.Module = down.layer if isinstance(down, Summed) else down
        if not isinstance(last, Fp8Linear) or not last.rounder.fuses:
            return None
        return None if any(_is_watched(part) for part in (down, last)) else last


def _is_watched(layer: nn.Module) -> bool:
    """Return whether a hook reads the layer's inputs in this step. A hook can have `is_active` to say that it does not."""
    hooks = layer._forward_hooks.values()
    return bool(layer._forward_pre_hooks) or "forward" in vars(layer) or any(getattr(hook, "is_active", True) for hook in hooks)


class PlainMlp(nn.Module):
    """last(activation(first(x))), by a family's own names of the two layers."""

    def __init__(self, width: int, inner: int, activation: str, bias: bool, names: tuple[str, str]) -> None:
        super().__init__()
        self.names, self._activation = names, activation
        self.add_module(names[0], nn.Linear(width, inner, bias))
        self.add_module(names[1], nn.Linear(inner, width, bias))
        if activation == "xielu":
            self.act_fn = Xielu()

    @property
    def activation(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the activation, a `Xielu` or one of `ACTIVATIONS`."""
        return self.act_fn if self._activation == "xielu" else ACTIVATIONS[self._activation]

    @property
    def matrices(self) -> tuple[Any, Any]:
        """Return the two layers."""
        first, last = (getattr(self, name) for name in self.names)
        return first, last

    def divide(self, ranks: Ranks) -> dict[str, AnyCut]:
        """Keep a rank's inner values; return the parts of its tensors, by name. Raises Unshardable."""
        (first, last), inner = self.names, self.matrices[0].out_features
        ranks.share(inner, "inner values")
        return {first: ranks.cut(inner), last: ranks.cut(inner, dim=1)}

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return [T, width] for states [T, width]."""
        first, last = self.matrices
        out: torch.Tensor = last(self.activation(first(states)))
        return out
