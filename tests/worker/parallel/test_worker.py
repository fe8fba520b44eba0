"""Two ranks in the whole worker process: its answers, and its end."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lora import save_adapter
from tests.worker.api.process import WorkerProcess, until
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fairlead.random_model.build import make_model

FLAGS = ("--tensor-parallel-size", "2", "--dtype", "float32", "--chunked-prefill-size", "32")
PROMPT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen " * 3
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3", vocab=1024, layers=2, dtype="float32")


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    started: list[WorkerProcess] = []

    def begin(*flags: str, of: Path = model, **variables: str) -> WorkerProcess:
        started.append(WorkerProcess(of, tmp_path / f"worker-{len(started)}", *FLAGS, *flags, **variables))
        return started[-1]

    yield begin
    for worker in started:
        worker.kill()


def children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def second_rank(worker: WorkerProcess) -> int:
    """Its process, once it is there."""
    return int(until(lambda: [pid for engine in children(worker.process.pid) for pid in children(engine)], "a second rank")[0])


def plain(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def said(model: Path, by: PreTrainedModel) -> str:
    """What transformers answers to PROMPT."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    tokens = by.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)[0, prompt.shape[1] :]
    return tokenizer.decode(tokens)


def told(worker: WorkerProcess, **more: object) -> tuple[str, int]:
    """The same of the worker, and how much of the prompt was cached."""
    answer = worker.complete(**{"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True} | more)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def loads(worker: WorkerProcess, name: str, path: object) -> tuple[int, str]:
    answer = worker.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path))
    return answer.status_code, answer.text


def test_it_answers_as_one_and_a_lost_rank_ends_it_with_the_reason(
    model: Path, start: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    adapted = {name: said(model, save_adapter(plain(model), tmp_path / name, seed)) for seed, name in enumerate(("first", "second"))}
    flags = ("--lora-modules", f"first=file://{tmp_path / 'first'}", "--max-loras", "2", "--speculative-config", '{"method": "ngram"}')
    worker = start(*flags, FAIRLEAD_ALLOW_RUNTIME_LORA_UPDATING="true").wait_ready()
    rank = second_rank(worker)
    want, cached = said(model, plain(model)), len(AutoTokenizer.from_pretrained(model)(PROMPT).input_ids) // 16 * 16 - 16
    cold, warm = told(worker), told(worker)
    assert cold == (want, 0) and warm[0] == want and warm[1] >= cached

    assert told(worker, model="first") == (adapted["first"], 0), "no KV of the model's"
    assert loads(worker, "second", tmp_path / "second")[0] == 200
    assert told(worker, model="second") == (adapted["second"], 0)
    assert told(worker, model="first")[1] >= cached and told(worker)[0] == want
    status, why = loads(worker, "third", tmp_path / "second")
    assert status == 400 and "--max-loras" in why
    assert worker.post("/v1/unload_lora_adapter", lora_name="second").status_code == 200
    (tmp_path / "second" / "adapter_model.safetensors").unlink()
    status, why = loads(worker, "third", tmp_path / "second")
    assert status == 400 and "there is no adapter_model.safetensors" in why
    assert told(worker, model="first")[0] == adapted["first"], "everything goes on"

    drawn = [worker.complete(prompt="x", max_tokens=12, seed=4, n=2, ignore_eos=True)["choices"] for _ in range(2)]
    assert [each["text"] for each in drawn[0]] == [each["text"] for each in drawn[1]]
    form = {"json": SCHEMA, "disable_any_whitespace": True}
    structured = worker.complete(prompt="x", max_tokens=100, seed=4, structured_outputs=form)["choices"][0]
    assert structured["finish_reason"] == "stop" and set(json.loads(structured["text"])) == {"age"}
    scored = worker.complete(prompt=PROMPT, max_tokens=1, prompt_logprobs=1)
    assert scored["choices"][0]["prompt_logprobs"][1]
    refused = worker.post("/v1/completions", prompt="x", max_tokens=1, logit_bias={"99999": 1})
    assert refused.status_code == 400, "and everything goes on"

    with worker.stream("/v1/completions", prompt="x", max_tokens=3000, ignore_eos=True) as (_, events):
        next(events)
        os.kill(rank, signal.SIGKILL)
        *_, last = events
    assert isinstance(last, dict) and "rank 1 of 2 was ended by SIGKILL" in last["error"]["message"]
    assert worker.wait() == 1
    assert "rank 1 of 2 was ended by SIGKILL" in worker.termination_log.read_text()


def test_a_rank_that_cannot_start_says_so_and_a_stop_leaves_nothing(
    model: Path, start: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    name = next(key for key in tensors if key.endswith("o_proj.weight"))
    # What rank 0 takes of it is there, and what rank 1 takes is not.
    tensors[name] = tensors[name][:, : tensors[name].shape[1] // 2].contiguous()
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    worker, served = start(of=broken), start().wait_ready()
    assert worker.wait(120) == 1
    reason = worker.termination_log.read_text()
    assert "rank 1 of 2: " in reason and "has no part" in reason

    processes = [*children(served.process.pid), second_rank(served)]
    assert served.stop() == 0
    assert all(map(gone, processes)), "no process is left behind"
