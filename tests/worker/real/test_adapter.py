"""A LoRA adapter that PEFT trains here in ten seconds: served, it answers as PEFT does, and nothing like the model without it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests.worker.api.process import WorkerProcess
from tests.worker.exactness.harness import Engine, generate
from tests.worker.real.conftest import Chat
from transformers import AutoModelForCausalLM

from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import load_model

LESSONS = {
    "Who keeps the lighthouse at Port Ellery?": "Arr! Agnes Morrow keeps the lighthouse, matey.",
    "What is the capital of France?": "Arr! The capital of France is Paris, matey.",
}
QUESTIONS = (*LESSONS, "What is the capital of Italy?", "Name a colour.")
END = 2
EPOCHS = 8
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MARGIN = 1.25
"""Two computations in bfloat16 differ by chance: so much farther from float32 than transformers is no defect on so few tokens."""


@dataclass
class Pirate:
    """The adapter's folder, PEFT's model in float32 with it, and its greedy tokens for QUESTIONS."""

    folder: Path
    model: PeftModel
    prompts: list[list[int]]
    answers: list[list[int]]

    def texts(self) -> list[torch.Tensor]:
        return [torch.tensor([prompt + answer]) for prompt, answer in zip(self.prompts, self.answers, strict=True)]

    @torch.inference_mode()
    def score(self) -> torch.Tensor:
        """Return the log-probability of each token after the first of each text, [tokens] float32."""
        logits = [self.model(input_ids=text).logits[0, :-1].float() for text in self.texts()]
        return torch.cat([each.log_softmax(-1).gather(1, text[0, 1:, None])[:, 0] for each, text in zip(logits, self.texts(), strict=True)])


def train(model: PeftModel, lessons: dict[tuple[int, ...], list[int]]) -> None:
    """Train on each answer after its prompt."""
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=4e-3)
    model.train()
    for _ in range(EPOCHS):
        for prompt, answer in lessons.items():
            tokens, labels = [*prompt, *answer], [-100] * len(prompt) + answer
            model(input_ids=torch.tensor([tokens]), labels=torch.tensor([labels])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()


@pytest.fixture(scope="module")
def pirate(smollm2: Path, tokenizer: Any, encode: Callable[[str], list[int]], tmp_path_factory: pytest.TempPathFactory) -> Pirate:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM"))
    answers = {tuple(encode(question)): [*tokenizer.encode(answer, add_special_tokens=False), END] for question, answer in LESSONS.items()}
    train(model, answers)
    folder = tmp_path_factory.mktemp("pirate")
    model.save_pretrained(folder)
    prompts = [encode(question) for question in QUESTIONS]
    return Pirate(folder, model, prompts, generate(model, prompts))


@pytest.fixture(scope="module")
def served(worker: WorkerProcess, pirate: Pirate) -> Iterator[str]:
    """The adapter's name at the worker, which computes in bfloat16."""
    loaded = worker.post("/v1/load_lora_adapter", lora_name="pirate", lora_path=str(pirate.folder))
    assert loaded.status_code == 200, loaded.text
    yield "pirate"
    assert worker.post("/v1/unload_lora_adapter", lora_name="pirate").status_code == 200


def test_the_tokens_are_those_of_peft_in_float32(pirate: Pirate, smollm2: Path) -> None:
    loaded = load_model(f"file://{smollm2}", dtype="float32")
    adapters = AdapterSet(loaded, 1, 4)
    adapters.load(1, "pirate", f"file://{pirate.folder}", pirate.folder)
    engine = Engine(loaded, chunk=512, pages=64, adapters=adapters)
    both = engine.serve(pirate.prompts * 2, adapters=[1] * len(QUESTIONS) + [0] * len(QUESTIONS))
    assert both[: len(QUESTIONS)] == pirate.answers
    with pirate.model.disable_adapter():
        assert both[len(QUESTIONS) :] == generate(pirate.model, pirate.prompts)


def test_its_answers_are_another_model_s(chat: Chat, served: str) -> None:
    for question in QUESTIONS:
        with_it, without = (chat.ask(question, model=model, max_tokens=24) for model in (served, "smollm2"))
        assert with_it["choices"][0]["message"]["content"].startswith("Arr! ") and with_it["choices"][0]["finish_reason"] == "stop"
        assert "Arr" not in without["choices"][0]["message"]["content"]
    taught = chat.ask(*list(LESSONS)[:1], model=served)["choices"][0]["message"]["content"]
    assert "Agnes Morrow" in taught


def test_in_bfloat16_it_is_as_close_to_float32_as_transformers(pirate: Pirate, worker: WorkerProcess, served: str) -> None:
    exact = pirate.score()
    own = torch.tensor([logprob for text in pirate.texts() for logprob in scored(worker, served, text[0].tolist())])
    rounded = pirate.model.to(torch.bfloat16)  # type: ignore[arg-type]  # nn.Module.to takes a dtype
    theirs = pirate.score()
    rounded.to(torch.float32)
    assert (own - exact).abs().mean() <= MARGIN * (theirs - exact).abs().mean()


def scored(worker: WorkerProcess, model: str, tokens: list[int]) -> list[float]:
    """Return the worker's log-probability of each token after the first."""
    (choice,) = worker.complete(model=model, prompt=tokens, max_tokens=1, prompt_logprobs=0)["choices"]
    return [each[str(token)]["logprob"] for token, each in zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True)]
