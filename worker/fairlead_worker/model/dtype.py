"""Which number format to compute in."""

from pathlib import Path

import torch
from transformers import PreTrainedConfig

from fairlead_worker.model.errors import ModelLoadError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(uri: str, wanted: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype named `wanted`; `auto` is the checkpoint's, or float32 where the CPU has no fast instructions for it."""
    if wanted != "auto":
        if wanted not in DTYPES:
            raise ModelLoadError(uri, f"unknown dtype {wanted!r}; set --dtype to one of: auto, {', '.join(DTYPES)}")
        return DTYPES[wanted]
    own = config.dtype or config.get_text_config(decoder=True).dtype or torch.float32
    if own not in DTYPES.values():
        raise ModelLoadError(uri, f"its dtype {own} is not supported; set --dtype to one of: {', '.join(DTYPES)}")
    fast = device.type != "cpu" or own == torch.float32 or (own == torch.bfloat16 and cpu_has_bfloat16())
    return own if fast else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 natively (AVX512-BF16 or AMX on x86, BF16 on Arm)."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)
