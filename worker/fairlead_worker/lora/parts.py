"""A rank's part of a LoRA adapter: what it adds to the rank's part of a layer.

A layer cut by its outputs has `up` cut as they are, and `down` whole; one cut by its inputs has `down` cut, and `up` whole: what it adds is
then a part of the sum that the ranks make of the layer's answers, and needs none of its own (so do vLLM's layers, its "fully sharded" ones
apart, which trade a smaller `down` for one more message). Ranks that share a KV head, or the whole of a layer, have the same.
"""

from fairlead_worker.lora.files import Pair
from fairlead_worker.sharding.shards import Cut


def part_of(pair: Pair, cut: Cut) -> Pair:
    """`cut`: of the layer's weight [out_features, in_features]. A copy, so that the rest need not stay in memory."""
    if cut.dim == 0:
        return Pair(pair.down, pair.up[cut.begin : cut.end].clone())
    return Pair(pair.down[:, cut.begin : cut.end].clone(), pair.up)
