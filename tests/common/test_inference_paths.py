"""Which paths are inference paths, and how the address of another port is formed."""

import pytest
from tests.admin_paths import ROUTER, WORKER, variants

from fairlead_common.http.inference_paths import INFERENCE, is_inference, with_port


@pytest.mark.parametrize("path", [*INFERENCE, "/v1/models/qwen", "/v1/models/org/name", "/v1/models/org%2Fname", "/v1/models/a.b-c"])
def test_inference_paths(path: str) -> None:
    assert is_inference(path)


@pytest.mark.parametrize("path", [*WORKER, *ROUTER, *INFERENCE])
def test_no_other_spelling_of_a_path_is_an_inference_path(path: str) -> None:
    others = [target for target in variants(path) if target != path]
    others += [f"{path}\x00", f"{path}%00", f"{path}#x", f"{path}%2f..%2f..%2fmetrics", path.replace("/", "\\"), path.removeprefix("/")]
    below_models = [target for target in others if path == "/v1/models" and target.startswith("/v1/models/") and len(target) > 11]
    assert not [target for target in others if is_inference(target) and target not in below_models]


def test_a_name_that_decodes_to_dots_or_more_escapes_is_no_model() -> None:
    for name in ("..", "a/../..", "%2e%2e", "a%2F..", "%252e", "a//b", "", "a%5Cb", "a%0d%0ab", "..%2fmetrics"):
        assert not is_inference(f"/v1/models/{name}"), name


def test_the_address_of_another_port() -> None:
    assert with_port("10.0.0.7:8000", 8002) == "10.0.0.7:8002" and with_port("[fd00::7]:8000", 8002) == "[fd00::7]:8002"
    assert with_port("10.0.0.7:8000", None) == "10.0.0.7:8000"
