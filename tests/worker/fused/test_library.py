"""Our calls of the small kernels against the real FlashInfer's signatures, read from its source."""

import ast
import inspect

import pytest
from bench.gpu import interpreter
from tests.worker.kernels.test_flashinfer_library import functions, signature, source

from fairlead_worker.model.fused import sums
from fairlead_worker.model.fused.library import Library

FILES = {"norm/__init__.py": "norm", "activation.py": "and_mul", "rope.py": "rope"}
NAMES = [name for name in vars(Library) if not name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_the_real_function_takes_our_arguments(name: str) -> None:
    folder = source()
    file = next(file for file, part in FILES.items() if part in name)
    tree = ast.parse((folder / file).read_text())
    real = signature(dict(functions(tree))[name], method=False)
    ours = list(inspect.signature(getattr(Library, name)).parameters)[1:]
    real.bind(*ours)
    assert list(real.parameters)[: len(ours)] == ours, "a position means the same to both"
    assert f"{name} as {name}" in (folder / "__init__.py").read_text(), "it is the module's own"


@pytest.mark.parametrize("name", NAMES)
def test_the_interpreted_function_takes_them_too(name: str) -> None:
    ours = list(inspect.signature(getattr(Library, name)).parameters)[1:]
    assert list(inspect.signature(getattr(interpreter, name)).parameters) == ours


@pytest.mark.parametrize("name", [name for name in vars(sums.Library) if not name.startswith("_")])
def test_the_real_sum_over_ranks_takes_our_arguments(name: str) -> None:
    folder = source() / "comm"
    real = signature(dict(functions(ast.parse((folder / "allreduce.py").read_text())))[name], method=False)
    parameters = list(inspect.signature(getattr(sums.Library, name)).parameters.values())[1:]
    ours = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    real.bind(*ours, **{parameter.name: None for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY})
    assert list(real.parameters)[: len(ours)] == ours, "a position means the same to both"
    source_of_kernel = (folder / "trtllm_ar.py").read_text()
    assert f"kARResidualRMSNorm = {sums.SUM_AND_NORM}\n" in source_of_kernel and "def get_trtllm_comm_module()" in source_of_kernel
