"""What a start imports, and what it does not: every pod waits for it."""

import gc
import subprocess
import sys

import pytest

from fairlead_worker.platform.imports import gc_frozen

FRONT = """
import sys
import fairlead_worker.main, fairlead_worker.api.server
print(*{"torch", "transformers", "huggingface_hub", "obstore", "httpx"} & set(sys.modules))
"""
ENGINE = """
import gc, sys
from fairlead_worker.model.lean import import_transformers
collections = sum(each["collections"] for each in gc.get_stats())
import_transformers()
print(sum(each["collections"] for each in gc.get_stats()) - collections, gc.isenabled(), gc.get_freeze_count() > 100_000)
import transformers.modeling_utils
print(*{"torchao", "sympy", "torch._dynamo", "torch.distributed.tensor"} & set(sys.modules))
from transformers.utils import is_torchao_available
import torchao
print(is_torchao_available())
import torch
from transformers.masking_utils import TransformGetItemToIndex
with TransformGetItemToIndex() as made:
    print(isinstance(made, torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex))
print(int(torch.compile(lambda numbers: numbers + 1, backend="eager")(torch.zeros(1))[0]))
"""
OTHER_RELEASE = """
import sys
from fairlead_worker.model import lean
lean.DECORATORS = lean.DECORATORS[:-1]
lean.import_transformers()
from transformers import LlamaForCausalLM
print("convert_frame" in dir(sys.modules["torch._dynamo"]))
"""


def printed(script: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120).stdout.splitlines()


def test_the_api_process_imports_neither_torch_nor_what_downloads() -> None:
    assert printed(FRONT) == [""]


def test_transformers_come_without_torchao_and_compiler_and_without_a_collection() -> None:
    """Both can be imported afterwards, and the compiler compiles."""
    pytest.importorskip("torchao")
    assert printed(ENGINE) == ["0 True True", "", "True", "True", "1"]


def test_a_release_that_takes_more_of_the_compiler_gets_it() -> None:
    assert printed(OTHER_RELEASE) == ["True"]


def test_collections_go_on_afterwards_and_pass_over_what_was_made() -> None:
    before = gc.get_freeze_count()
    try:
        with gc_frozen():
            assert not gc.isenabled()
            made: list[object] = [[] for _ in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()
