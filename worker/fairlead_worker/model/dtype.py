"""Choice of the computing dtype."""

import torch
from transformers import PreTrainedConfig

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.native.library import native
from fairlead_worker.platform.isa import multiplies_bfloat16

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(uri: str, wanted: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Return the dtype named `wanted`; `auto` is the checkpoint's, or float32 if that is faster.

    If the CPU has no bfloat16 products, the compiled kernels convert bfloat16 to float32 in registers and read half as many bytes.
    With AVX2 a decode of one row takes 2.6 ms, in float32 5.0, and a prefill is equally fast. torch alone needs the products: without
    them float32 is several times faster.
    """
    if wanted != "auto":
        if wanted not in DTYPES:
            raise ModelLoadError(uri, f"unknown dtype {wanted!r}; set --dtype to one of: auto, {', '.join(DTYPES)}")
        return DTYPES[wanted]
    own = config.dtype or config.get_text_config(decoder=True).dtype or torch.float32
    if own not in DTYPES.values():
        raise ModelLoadError(uri, f"its dtype {own} is not supported; set --dtype to one of: {', '.join(DTYPES)}")
    fast = device.type != "cpu" or own == torch.float32 or (own == torch.bfloat16 and (native() is not None or multiplies_bfloat16()))
    return own if fast else torch.float32
