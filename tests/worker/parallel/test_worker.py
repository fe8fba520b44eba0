"""Two ranks through the whole worker process: what it answers, and how it ends."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.worker.api.process import WorkerProcess, until
from transformers import AutoModelForCausalLM, AutoTokenizer

from fairlead.random_model.build import make_model

FLAGS = ("--tensor-parallel", "2", "--dtype", "float32", "--chunked-prefill-size", "32")
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

    def begin(*flags: str, of: Path = model) -> WorkerProcess:
        started.append(WorkerProcess(of, tmp_path / f"worker-{len(started)}", *FLAGS, *flags))
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


def test_it_answers_as_one_and_a_lost_rank_ends_it_with_the_reason(model: Path, start: Callable[..., WorkerProcess]) -> None:
    worker = start("--speculative-method", "ngram").wait_ready()
    rank = second_rank(worker)
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    said = plain.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)[0, prompt.shape[1] :]
    cold, warm = (worker.complete(prompt=prompt[0].tolist(), max_tokens=24, temperature=0, ignore_eos=True) for _ in range(2))
    assert cold["choices"][0]["text"] == warm["choices"][0]["text"] == tokenizer.decode(said)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= prompt.shape[1] // 16 * 16 - 16

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
