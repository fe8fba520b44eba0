"""Our calls against the real FlashInfer's signatures, read from its source: no device, and no import, is needed."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from bench.gpu import interpreter, kernels
from bench.gpu.batches import packed

from fairlead_worker.kernels import prebuild
from fairlead_worker.kernels.base import KVSpec, LayerSpec
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.flashinfer_library import MODULES
from fairlead_worker.kernels.paging import pad_rows, plan_pages
from fairlead_worker.model.layers import mlp

LAYER = LayerSpec(8, 2, 64, 64, 0.125)
STORES = ("append_paged_kv_cache", "rope_quantize_fp8_append_paged_kv_cache", "append_paged_mla_kv_cache")
PREFILL, DECODE, LATENTS = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper"


@dataclass
class Call:
    name: str
    arguments: tuple[object, ...]
    named: dict[str, object]


class Recorder:
    """The interpreter, and what it was called with."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.MLAPlanMetadata = interpreter.MLAPlanMetadata
        for name in (PREFILL, DECODE, LATENTS):
            setattr(self, name, self._recorded(name, getattr(interpreter, name)))
        for name in STORES:
            setattr(self, name, self._recorded(name, getattr(interpreter, name)))

    def _recorded(self, name: str, function):
        def call(*arguments: object, **named: object):
            self.calls.append(Call(name, arguments, named))
            made = function(*arguments, **named)
            for method in ("plan", "run") if inspect.isclass(function) else ():
                setattr(made, method, self._recorded(f"{name}.{method}", getattr(made, method)))
            return made

        return call


def our_calls() -> list[Call]:
    """Every kind of call that the backend makes: a mixed step and one of decodes, with a window, in float8, in graphs."""
    recorder = Recorder()
    for scales in ((0.5, 1.0), None):
        spec = KVSpec((LAYER, replace(LAYER, window=5, softcap=3.0)), 4, torch.bfloat16, torch.device("cpu"), scales)
        backend = FlashInferBackend(spec, 8, recorder)
        for rows, tables in (([(0, 5), (3, 1)], [[1, 2], [4]]), ([(5, 1), (4, 1)], [[1, 2], [4, 5]])):
            context = backend.plan(packed(rows, tables, 4, spec.device))
            total = sum(count for _, count in rows)
            for layer in range(2):
                context.attend(layer, *(torch.randn(total, heads, 64).bfloat16() for heads in (8, 2, 2)))
    step = packed([(5, 1), (4, 1)], [[1, 2], [4, 5]], 4, spec.device)
    paging = plan_pages(step, 4)
    for each in (paging, pad_rows(paging, 3)):
        backend.plan_graph(backend.graph_wrappers(each), each)
    latent = FlashInferBackend(KVSpec((LayerSpec(16, 1, 576, 512, 0.1, value_in_key=True),), 4, torch.bfloat16, spec.device), 8, recorder)
    latent.plan(step).attend(0, *(torch.randn(2, *shape).bfloat16() for shape in ((16, 576), (1, 576), (1, 512))))
    graph = replace(paging, lengths=torch.zeros_like(paging.lengths))
    latent.plan_graph(latent.graph_wrappers(graph), paging)
    return recorder.calls


def test_all_that_is_used_is_called() -> None:
    names = {call.name for call in our_calls()}
    assert names == {
        PREFILL,
        DECODE,
        LATENTS,
        *STORES,
        *(f"{name}.{method}" for name in (PREFILL, DECODE, LATENTS) for method in ("plan", "run")),
    }


MLA = "mla/_batch_mla/_wrapper"


def test_the_metadata_of_latents_is_as_we_give_it() -> None:
    contracts = dict(functions(ast.parse((source() / "mla/_batch_mla/_contracts.py").read_text())))
    assert [arg.arg for arg in contracts["MLAPlanMetadata.csr"].args.args] == ["cls", "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"]
    assert "MLAPlanMetadata as MLAPlanMetadata" in (source() / "mla/_core.py").read_text()
    assert "from ._core import *" in (source() / "mla/__init__.py").read_text()


def source() -> Path:
    """Return the folder of FlashInfer's package, which has an environment of its own (`make gpu-kernels`)."""
    if problem := kernels.ENVIRONMENT.install():
        pytest.skip(f"FlashInfer cannot be installed: {problem}")
    return kernels.site() / "flashinfer"


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Qualified names; of overloads the last, which is the function itself."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for child in node.body:
                if isinstance(child, ast.FunctionDef):
                    yield f"{node.name}.{child.name}", child


def signature(function: ast.FunctionDef, method: bool) -> inspect.Signature:
    """Of the definition, with every default standing for itself."""
    kinds, given = inspect.Parameter, function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [inspect.Parameter.empty] * (len(plain) - len(given.defaults)) + [...] * len(given.defaults)
    parameters = [kinds(arg.arg, kinds.POSITIONAL_OR_KEYWORD, default=default) for arg, default in zip(plain, defaults, strict=True)]
    if given.vararg:
        parameters.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(kinds(arg.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else ...))
    if given.kwarg:
        parameters.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters[1:] if method else parameters)


def interpreted(name: str) -> list[str]:
    """Parameters of the interpreter's function of that name."""
    part: object = interpreter
    for step in name.split("."):
        part = getattr(part, step)
    return list(inspect.signature(part).parameters)[1 if "." in name else 0 :]  # type: ignore[arg-type]  # a function or a class


def test_the_real_functions_take_our_arguments() -> None:
    folder = source()
    files = [ast.parse((folder / f"{name}.py").read_text()) for name in ("prefill", "decode", "page", "rope", "topk", "sampling", MLA)]
    found = {name: node for file in files for name, node in functions(file)}
    for call in our_calls():
        name = f"{call.name}.__init__" if call.name in (PREFILL, DECODE, LATENTS) else call.name
        real = signature(found[name], "." in name)
        real.bind(*call.arguments, **call.named)
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in real.parameters.values()):
            real = signature(found[f"{name.rpartition('.')[0]}._plan_impl"], True)  # decode's `plan` hands on what it does not name
            real.bind(*call.arguments, **call.named)
        positional = list(real.parameters)[: len(call.arguments)]
        assert positional == interpreted(call.name)[: len(call.arguments)], f"{name}: a position means the same to both"


def test_the_functions_are_where_the_worker_looks() -> None:
    """FlashInfer exports nearly all of its functions; `MODULES` names the other places."""
    package, *others = (ast.parse(_file(name).read_text()) for name in MODULES)
    exported = {alias.asname or alias.name for node in ast.walk(package) if isinstance(node, ast.ImportFrom) for alias in node.names}
    defined = {name for tree in others for name, _ in functions(tree)}
    used = {call.name for call in our_calls() if "." not in call.name}
    assert used <= exported | defined
    assert used & (defined - exported), "the other modules are needed"


def _file(module: str) -> Path:
    path = source().parent / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_the_kernels_have_the_head_sizes_that_we_count_on() -> None:
    text = (source() / "data/include/flashinfer/utils.cuh").read_text()
    cases = text[text.index("define DISPATCH_HEAD_DIM(") :].partition("default:")[0]
    assert all(f"case {dim}:" in cases for dim in interpreter.HEAD_DIMS)


def test_the_image_compiles_what_fused_layers_call() -> None:
    """A pod has no compiler: what is missing there is left unfused."""
    assert {f"{name}_and_mul" for name in prebuild.ACTIVATIONS} == set(mlp.KERNELS.values())
    jit = source() / "jit"
    parts = ("page", "norm", "rope", "activation", "topk", "sampling")
    made = {name for part in parts for name, _ in functions(ast.parse((jit / f"{part}.py").read_text()))}
    modules = ("page", "norm", "rope", "act_and_mul", "topk", "sampling")
    assert {f"gen_{name}_module" for name in modules} <= made
    assert all(f'"{name}"' in (jit / "activation.py").read_text() for name in prebuild.ACTIVATIONS)
