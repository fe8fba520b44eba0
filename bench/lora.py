"""What LoRA adapters cost: the same streams on the model alone, with one adapter, with three, and with three beside the model's own.

Adapters of rank 16 on every linear layer. A model with an adapter merged into it costs what the model alone does. On a CPU the native
decoder runs rows without adapters only, so the model is shown module by module too: that is what adapters add to.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from compare import Figures, options, report, take_turns
from fairlead_worker.execution.runner import ModelRunner, make_runner
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import LoadedModel, load_model
from serving import PAGE_SIZE, Arrival, scheduler_for, serve_on
from shapes import saved

RANK, PROMPT = 16, 32
TARGETS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
ADAPTERS = {"model": (0,), "one adapter": (1,), "three adapters": (1, 2, 3), "three and the model": (0, 1, 2, 3)}
"""Whose requests take turns in the workload."""


def write_adapter(loaded: LoadedModel, folder: Path, seed: int) -> None:
    """Random, of RANK."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for path, module in loaded.model.named_modules():
        if path.rpartition(".")[2] in TARGETS:
            for half, shape in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
                weights[f"base_model.model.{path}.lora_{half}.weight"] = torch.randn(shape, generator=generator) * 0.02  # type: ignore[arg-type]  # in_features is an int
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))


def main() -> None:
    chosen = options(__doc__)
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

        sides = {name: lambda numbers=numbers: side(runner, numbers) for name, numbers in ADAPTERS.items()}
        sides["model, module by module"] = lambda: side(plain, (0,))
        about = {"model": shape, "dtype": "bfloat16", "threads": chosen.threads, "streams": streams, "rank": RANK, "output": output}
        report(about, take_turns(sides, chosen.repeats), [], chosen.json)


if __name__ == "__main__":
    main()
