"""GPUs by name: memory, compute capability and multiprocessors."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory_mib: int
    """`memory.total` of nvidia-smi. The driver keeps a part of what a data sheet names."""
    capability: tuple[int, int]
    multiprocessors: int

    @property
    def total(self) -> int:
        """Return its memory in bytes."""
        return self.memory_mib << 20


class UnknownGpu(ValueError):
    """No GPU has this name. The message lists those that are known."""


_KNOWN: Final = (
    Gpu("T4", 15360, (7, 5), 40),
    Gpu("V100-16GB", 16384, (7, 0), 80),
    Gpu("V100-32GB", 32768, (7, 0), 80),
    Gpu("A10", 23028, (8, 6), 72),
    Gpu("A10G", 23028, (8, 6), 80),
    Gpu("L4", 23034, (8, 9), 58),
    Gpu("RTX-4090", 24564, (8, 9), 128),
    Gpu("RTX-5090", 32607, (12, 0), 170),
    Gpu("A100-40GB", 40960, (8, 0), 108),
    Gpu("A40", 46068, (8, 6), 84),
    Gpu("L40S", 46068, (8, 9), 142),
    Gpu("RTX-A6000", 49140, (8, 6), 84),
    Gpu("RTX-6000-Ada", 49140, (8, 9), 142),
    Gpu("A100", 81920, (8, 0), 108),
    Gpu("H100", 81559, (9, 0), 132),
    Gpu("GH200", 97871, (9, 0), 132),
    Gpu("RTX-PRO-6000", 97887, (12, 0), 188),
    Gpu("H200", 143771, (9, 0), 132),
    Gpu("B200", 183359, (10, 0), 148),
)
"""Memory: as nvidia-smi prints it on these devices. Capability: https://developer.nvidia.com/cuda-gpus. Multiprocessors: NVIDIA's
architecture white papers (of the H100: SXM5, of the A100: both sizes). A100 and H100 without a size are those of 80 GB."""
GPUS: Final[Mapping[str, Gpu]] = {gpu.name: gpu for gpu in _KNOWN}


def find_gpu(name: str) -> Gpu:
    """Return the GPU called `name`, in any case, with `-`, `_`, or a space. Raises UnknownGpu."""
    by_key = {_key(known): gpu for known, gpu in GPUS.items()}
    if (gpu := by_key.get(_key(name).removeprefix("nvidia"))) is not None:
        return gpu
    meant = get_close_matches(_key(name), by_key, 1, 0.6)
    hint = f"did you mean {by_key[meant[0]].name}? " if meant else ""
    raise UnknownGpu(f"{hint}known are {', '.join(GPUS)}; give another one's memory as a number with a unit, as in 48GiB")


def _key(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
