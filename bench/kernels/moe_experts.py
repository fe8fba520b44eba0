"""CPU time of transformers' expert implementations for a mixture-of-experts model.

The implementations alternate. Figures are the process time of one pass through the body of the model.
"""

import statistics
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.common.report import make_parser, write_report

WAYS = ("eager", "batched_mm", "grouped_mm")
TOKENS = (1, 8, 64, 256)
MOST_BATCHED = 64
"""Token limit of `batched_mm`, which copies the weights of each token's experts: gigabytes for more tokens."""


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=1024, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        num_experts=32, num_experts_per_tok=4, moe_intermediate_size=256, intermediate_size=1024, max_position_embeddings=4096,
    )  # fmt: skip
    results: dict[str, dict[str, float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        print(f"{dtype}, default {config._experts_implementation}; milliseconds")
        print("tokens  " + "  ".join(f"{way:>10}" for way in WAYS))
        for tokens in TOKENS:
            times = measure(model, tokens, arguments.rounds)
            results[f"{dtype}, {tokens} tokens"] = times
            print(f"{tokens:6}  " + "  ".join(f"{times[way]:10.1f}" if way in times else f"{'':>10}" for way in WAYS))
    write_report(__name__, arguments, results)


@torch.inference_mode()
def measure(model: Any, tokens: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each implementation. They run in turns."""
    ways = [way for way in WAYS if way != "batched_mm" or tokens <= MOST_BATCHED]
    taken: dict[str, list[float]] = {way: [] for way in ways}
    ids = torch.randint(1024, (1, tokens))
    for _ in range(rounds):
        for way in ways:
            model.set_experts_implementation(way)
            began = time.process_time()
            model.model(ids, use_cache=False)
            taken[way].append(1000 * (time.process_time() - began))
    return {way: statistics.median(each) for way, each in taken.items()}
