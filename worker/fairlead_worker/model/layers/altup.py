"""Alternating updates (Baykal et al. 2023) and low-rank residuals (LAuReL, Menghani et al. 2024), as Gemma 3n has them."""

from statistics import NormalDist

import torch
from torch import nn

from fairlead_worker.model.layers.mlp import ACTIVATIONS, GatedMlp
from fairlead_worker.model.layers.norm import RmsNorm


class AltUp(nn.Module):
    """A token has several states [inputs, T, width], of which a layer computes one; the others are predicted and corrected."""

    def __init__(self, width: int, inputs: int, active: int, eps: float) -> None:
        super().__init__()
        self.inputs, self.active = inputs, active
        self.correct_output_scale = nn.Parameter(torch.empty(width))
        self.correction_coefs = nn.Linear(inputs, inputs, bias=False)
        self.prediction_coefs = nn.Linear(inputs, inputs**2, bias=False)
        self.modality_router = nn.Linear(width, inputs, bias=False)
        self.router_norm = RmsNorm(width, eps)

    def predict(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states [inputs, T, width] that each token would have after the layer."""
        factors = self.prediction_coefs(self._route(states[self.active])).view(-1, self.inputs, self.inputs)
        predictions: torch.Tensor = torch.einsum("tji,itw->jtw", factors, states)
        return predictions + states

    def correct(self, predictions: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Return the states [inputs, T, width] by the layer's result `computed` [T, width]."""
        factors: torch.Tensor = self.correction_coefs(self._route(computed)) + 1.0
        return predictions + (computed - predictions[self.active]) * factors.t()[..., None]

    def _route(self, states: torch.Tensor) -> torch.Tensor:
        routed = self.modality_router(self.router_norm(states) * states.shape[-1] ** -1.0)
        return torch.tanh(routed.float()).to(states.dtype)


class Laurel(nn.Module):
    """x + norm(right(left(x)))."""

    def __init__(self, width: int, rank: int, eps: float) -> None:
        super().__init__()
        self.linear_left = nn.Linear(width, rank, bias=False)
        self.linear_right = nn.Linear(rank, width, bias=False)
        self.post_laurel_norm = RmsNorm(width, eps)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return [T, width] for states [T, width]."""
        out: torch.Tensor = states + self.post_laurel_norm(self.linear_right(self.linear_left(states)))
        return out


class SparseMlp(GatedMlp):
    """A gated MLP that keeps the share 1 - `sparsity` of a token's gates: those above a quantile of their normal distribution."""

    def __init__(self, width: int, inner: int, activation: str, sparsity: float) -> None:
        super().__init__(width, inner, activation)
        self.cutoff = NormalDist().inv_cdf(sparsity)

    def _activate(self, states: torch.Tensor) -> torch.Tensor:
        gate, up = self.project(states)
        cutoff = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, unbiased=False) * self.cutoff
        return ACTIVATIONS[self.activation](torch.relu(gate - cutoff)) * up
