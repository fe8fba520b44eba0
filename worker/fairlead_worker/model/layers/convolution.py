"""Causal convolution over the last tokens of a row, each channel by itself, as recurrent layers have it before their states."""

import torch
from torch import nn
from torch.nn import functional

from fairlead_worker.kernels.states import StateSpec


class CausalConvolution(nn.Module):
    """y[t] = sum over k of weight[k] * x[t - K + 1 + k], by the names and shapes of torch's `Conv1d`."""

    def __init__(self, channels: int, size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    @property
    def state(self) -> StateSpec:
        """Return what it keeps: the last K - 1 inputs."""
        channels, _, size = self.weight.shape
        return StateSpec(((size - 1, channels),), (self.weight.dtype,))

    def advance(self, inputs: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs [B, L, channels] and the last K - 1 inputs. before: those before the first token, [B, K - 1, channels]."""
        size, dtype = self.weight.shape[2], inputs.dtype
        joined = torch.cat((before.to(dtype), inputs), 1)
        bias = None if self.bias is None else self.bias.to(dtype)
        outputs = functional.conv1d(joined.transpose(1, 2), self.weight.to(dtype), bias, groups=joined.shape[2]).transpose(1, 2)
        return outputs, joined[:, joined.shape[1] - size + 1 :]
