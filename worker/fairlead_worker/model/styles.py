"""How ranks divide the parts of a decoder, by the kinds of its modules."""

from collections.abc import Iterator

from torch import nn

from fairlead_worker.model.layers.causal import CausalAttention
from fairlead_worker.model.layers.mlp import GatedMlp, PlainMlp
from fairlead_worker.sharding.shards import COLUMNS, HALVES, RECURRENT, REPLICATE, ROWS


def find_styles(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the path and the style (`sharding.shards`) of each part that is divided.

    Attention whose norm is of all heads together stays whole on every rank.
    """
    for path, module in model.named_modules():
        if hasattr(module, "divide"):
            yield path, RECURRENT
        elif isinstance(module, CausalAttention):
            inputs, last = (REPLICATE, REPLICATE) if module.head_norms == "all" else (COLUMNS, ROWS)
            yield from ((f"{path}.{name}", inputs) for name in module.PARTS)
            yield f"{path}.{module.names.output}", last
        elif isinstance(module, GatedMlp):
            yield from ((f"{path}.{name}", COLUMNS) for name in module.PARTS)
            yield f"{path}.{module.STACK}", HALVES
            yield f"{path}.{module.DOWN}", ROWS
        elif isinstance(module, PlainMlp):
            first, last = module.names
            yield f"{path}.{first}", COLUMNS
            yield f"{path}.{last}", ROWS
