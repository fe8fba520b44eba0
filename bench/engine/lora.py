"""Cost of LoRA adapters: the same streams on the model alone, with one adapter, with three, and with both.

The adapters have rank 16 on every linear layer. A model with a merged adapter costs as much as the model alone. On a CPU the native decoder
runs only rows without adapters, so the model is also measured module by module: that is the baseline of the adapters' cost.
"""

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from bench.common.compare import Figures, parse_options, print_report, take_turns
from bench.common.models import saved
from bench.common.report import write_report
from bench.common.serving import PAGE_SIZE, Arrival, scheduler_for, serve_on
from fairlead_worker.execution.runner import ModelRunner, make_runner
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import LoadedModel, load_model

RANK, PROMPT = 16, 32
TARGETS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
ADAPTERS = {"model": (0,), "one adapter": (1,), "three adapters": (1, 2, 3), "three and the model": (0, 1, 2, 3)}
"""Adapters by side. Their requests alternate in the workload."""


def write_adapter(loaded: LoadedModel, folder: Path, seed: int) -> None:
    """Write a random adapter of rank RANK to `folder`."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for path, module in loaded.model.named_modules():
        if path.rpartition(".")[2] in TARGETS:
            for half, shape in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
                weights[f"base_model.model.{path}.lora_{half}.weight"] = torch.randn(shape, generator=generator) * 0.02
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))


def main() -> None:
    chosen = parse_options(__name__, __doc__)
    streams, output, shape = (4, 8, "tiny") if chosen.quick else (16, 64, "qwen3-90M")
    with saved(shape) as folder, TemporaryDirectory() as scratch:
        loaded = load_model(folder)
        adapters = AdapterSet(loaded, 3, RANK)
        for number in (1, 2, 3):
            write_adapter(loaded, Path(scratch, str(number)), number)
            adapters.load(number, str(number), "random", Path(scratch, str(number)))
        pages = streams * -(-(PROMPT + output) // PAGE_SIZE)
        runner = make_runner(loaded, page_size=PAGE_SIZE, kv_pages=pages, adapters=adapters)
        plain = make_runner(loaded, page_size=PAGE_SIZE, kv_pages=pages, native_decoder=False)

        def side(with_: ModelRunner, numbers: tuple[int, ...]) -> Figures:
            prompts = [[(7 * stream + token) % 500 + 2 for token in range(PROMPT)] for stream in range(streams)]
            workload = [Arrival(0.0, prompt, output, adapter=numbers[at % len(numbers)]) for at, prompt in enumerate(prompts)]
            return serve_on(scheduler_for(with_), with_, workload, adapters).figures()

        sides = {name: partial(side, runner, numbers) for name, numbers in ADAPTERS.items()}
        sides["model, module by module"] = partial(side, plain, (0,))
        about = {"model": shape, "dtype": "bfloat16", "threads": chosen.threads, "streams": streams, "rank": RANK, "output": output}
        write_report(__name__, chosen, print_report(about, take_turns(sides, chosen.repeats), []))
