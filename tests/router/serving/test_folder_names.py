"""A served name that is a folder, as vLLM's clients send it when `--model` names one."""

import pytest
from tests.router.harness import Fleet
from tests.router.prompt_format import make_format

NAME = "/models/Qwen3-8B"


@pytest.mark.parametrize("path", ["/v1/models//models/Qwen3-8B", "/v1/models/%2Fmodels%2FQwen3-8B"])
async def test_requests_and_the_list_of_models_use_it(fleet: Fleet, path: str) -> None:
    router = await fleet.router(await fleet.worker(format=make_format(NAME)), served_model_name=NAME)
    answer = await router.client.post("/v1/completions", json={"model": NAME, "prompt": "x"})
    assert answer.status_code == 200, answer.text
    assert [one["id"] for one in (await router.client.get("/v1/models")).json()["data"]] == [NAME]
    assert (await router.client.get(path)).json()["id"] == NAME
    assert (await router.client.post("/v1/completions", json={"model": "Qwen3-8B", "prompt": "x"})).status_code == 404
