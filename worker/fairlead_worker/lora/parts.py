"""A rank's part of a LoRA adapter: the addition to the rank's part of a layer.

If a layer is cut by its outputs, `up` is cut likewise and `down` is whole. If it is cut by its inputs, `down` is cut and `up` is
whole: the addition is then part of the layer's own sum over the ranks and needs no extra sum. vLLM's layers do the same, except its
"fully sharded" ones, which trade a smaller `down` for one more message. Ranks that share a KV head, or a whole layer, have the same
part.
"""

from fairlead_worker.lora.files import Pair
from fairlead_worker.sharding.shards import Cut


def part_of(pair: Pair, cut: Cut) -> Pair:
    """Return the rank's part for `cut` of the layer's weight [out_features, in_features]. It is a copy, so that the rest can be freed."""
    if cut.dim == 0:
        return Pair(pair.down, pair.up[cut.begin : cut.end].clone())
    return Pair(pair.down[:, cut.begin : cut.end].clone(), pair.up)
