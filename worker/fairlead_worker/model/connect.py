"""Connection of a sharded model's parts with the other ranks."""

import torch
from torch import nn
from transformers import PreTrainedModel

from fairlead_worker.model.layers.causal import CausalAttention
from fairlead_worker.model.layers.mamba2 import GroupNorm
from fairlead_worker.model.lowbit.linear import is_plain
from fairlead_worker.sharding.group import Gathered, Group, Summed
from fairlead_worker.sharding.shards import Shards


def connect(model: PreTrainedModel, shards: Shards, group: Group) -> None:
    """Connect the parts of a loaded model with those of the other ranks, in place."""
    for path in shards.summed:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Summed(model.get_submodule(path), group))
    for module in model.modules():
        if isinstance(module, GroupNorm | CausalAttention):
            module.ranks = group
    if not shards.head:
        return
    head: nn.Module = model.get_submodule(shards.head)
    if model.config.get_text_config(decoder=True).tie_word_embeddings:
        if not isinstance(head, nn.Linear) or not is_plain(head):
            return  # few bits or a library's own weight type have no views, so every rank computes all logits
        head = _part(head, shards)
    parent, _, name = shards.head.rpartition(".")
    setattr(model.get_submodule(parent), name, Gathered(head, group))


def _part(head: nn.Linear, shards: Shards) -> nn.Linear:
    """Return this rank's part of a head that shares the embedding's weight: a view of it."""
    each = head.out_features // shards.size
    begin = shards.rank * each
    with torch.device("meta"):
        part = nn.Linear(head.in_features, each, bias=head.bias is not None)
    part.weight = nn.Parameter(head.weight[begin : begin + each], requires_grad=False)
    if head.bias is not None:
        part.bias = nn.Parameter(head.bias[begin : begin + each], requires_grad=False)
    return part
