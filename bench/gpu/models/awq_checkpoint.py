"""A checkpoint in AWQ's 4 bits, made of one in bfloat16."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

AWQ, GROUP = "awq", 128
ABOUT = {"quant_method": AWQ, "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 outputs a word has in each 4 bits, from the lowest on."""


def save_awq(source: Path, folder: Path, device: torch.device) -> Path:
    """The checkpoint in `source` with its linear layers' weights rounded to 4 bits, by the least and the largest of 128 inputs."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            if not path.name.startswith("model.safetensors"):
                shutil.copy(path, folder)
            continue
        with safe_open(path, framework="pt", device=str(device)) as stored:
            for name in stored.keys():  # noqa: SIM118  # no mapping
                tensor = stored.get_tensor(name)
                if not name.endswith("_proj.weight"):
                    tensors[name] = tensor
                    continue
                groups = tensor.float().unflatten(1, (-1, GROUP))
                least, most = groups.aminmax(dim=2)
                scale = ((most - least) / 15).half()
                zero = (-least / scale.float()).round().clamp(0, 15)
                codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15).flatten(1)
                layer = name.removesuffix(".weight")
                tensors[f"{layer}.qweight"], tensors[f"{layer}.qzeros"] = _words(codes.T), _words(zero.T)
                tensors[f"{layer}.scales"] = scale.T.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": ABOUT}))
    return folder


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Pack [rows, outputs] -> [rows, outputs / 8] int32."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int32, device=codes.device)
    for place, output in enumerate(ORDER):
        words |= codes[:, output::8].to(torch.int32) << 4 * place
    return words
