"""Digest of a model's files: equal on every pod with the same files, and cheap for hundreds of gigabytes."""

from collections.abc import Iterator
from pathlib import Path

import xxhash

WEIGHTS = ("*.safetensors", "*.gguf")
SAMPLES = 16
SAMPLE_BYTES = 4096


def model_digest(folder: Path) -> str:
    """Return a hex digest of config.json and of each weight file's name, size and 16 samples of 4 KiB.

    Sizes and headers alone would be equal for two fine-tunes of one architecture. The samples distinguish them with a few reads per
    file.
    """
    digest = xxhash.xxh3_128((folder / "config.json").read_bytes())
    for path in sorted(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        for sample in _samples(path, size):
            digest.update(sample)
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return a hex digest of one file's size and samples."""
    size = path.stat().st_size
    digest = xxhash.xxh3_128(str(size).encode())
    for sample in _samples(path, size):
        digest.update(sample)
    return digest.hexdigest()


def _samples(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for sample in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)
