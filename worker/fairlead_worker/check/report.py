"""Checks a model: by which path it would be served, and what memory holds, with the code of loader, probe, scheduler and memory profile."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fairlead_worker.build import check_encoder_flags, chunk_seconds, graph_rows, step_config
from fairlead_worker.check.gpus import GPUS, Gpu
from fairlead_worker.check.kept import find_kept
from fairlead_worker.check.memory import PredictedMemory, StepMemory, device_weight_bytes, gguf_weight_bytes, host_weight_bytes
from fairlead_worker.check.skeleton import Skeleton, make_skeleton, native_refusal
from fairlead_worker.config import WorkerConfig
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.execution.memory import free_memory, host_kv_budget
from fairlead_worker.execution.sizing import largest_chunk, profile_memory
from fairlead_worker.kernels.base import KVSpec
from fairlead_worker.kernels.groups import cache_groups, choose_groups, describe_groups
from fairlead_worker.kernels.registry import choose_backend
from fairlead_worker.kernels.states import count_slots, count_token_pages, describe_states
from fairlead_worker.kernels.workspace import graph_workspace_bytes, workspace_bytes
from fairlead_worker.model.decoder import Decoder
from fairlead_worker.model.encoder import is_encoder, max_length, plan_encoder
from fairlead_worker.model.families.registry import FAMILIES
from fairlead_worker.model.formats.choose import made_bytes
from fairlead_worker.model.kv_scales import read_kv_scales
from fairlead_worker.model.loader import layers_with_kv
from fairlead_worker.model.mechanisms import describe_mechanisms
from fairlead_worker.model.plan import LoadPlan, plan_load
from fairlead_worker.scheduler.config import LEAST_CHUNK
from fairlead_worker.scheduler.limits import StepLimits, limit_steps

logger = logging.getLogger(__name__)

GPU_BYTES = 640 << 20
"""Assumed: a CUDA context with the code of torch, cuBLAS and FlashInfer, on each GPU."""
GRAPH_BYTES = 512 << 20
"""Assumed: CUDA graphs of decodes. A worker measures them."""
HOST_BYTES = 490 << 20
"""Both processes of a worker on a CPU without weights, KV and vocabulary: 455 to 520 MiB with SmolLM2 and all-MiniLM-L6-v2."""
HOST_TOKEN_BYTES = 3 << 10
"""What a decoder takes for each token of its vocabulary: tokenizer and logits. Measured: 3.4 KiB with SmolLM2, 2.8 with Gemma 3 270M."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a worker with these settings would do. Bytes are those of each device."""

    model: str
    served: bool = False
    uncounted: str = ""
    """Settings whose memory is not in the report."""
    problem: str = ""
    """Why it cannot be served so, and what would have to change."""
    model_type: str = ""
    path: str = ""
    """native, layers, transformers or encoder: see `model.catalog.PATHS`."""
    path_reason: str = ""
    """Why it is not a faster path."""
    attention: str = ""
    """The attention backend."""
    attention_reason: str = ""
    mechanisms: str = ""
    dtype: str = ""
    quantization: str = "none"
    device: str = ""
    devices: int = 1
    memory_bytes: int = 0
    """Of a device; of a CPU, the free memory."""
    weight_bytes: int = 0
    process_bytes: int = 0
    """What the worker takes besides weights, steps and KV: on a GPU libraries and their workspace, on a CPU both processes."""
    step_bytes: int = 0
    """What the largest step takes on a GPU."""
    step_tokens: int = 0
    chunk_tokens: int = 0
    """Tokens of a chunk, at most: a GPU whose speed does not rise with the chunk takes fewer. Below 1: prompts are not cut."""
    generates: bool = True
    """False: its files have no head, and it makes embeddings only."""
    kv_dtype: str = ""
    kv_groups: str = ""
    """How layers share KV pages."""
    kv_bytes_per_token: int = 0
    kv_bytes: int = 0
    state_bytes: int = 0
    """Of recurrent layers: all slots of running requests and snapshots."""
    kv_tokens: int = 0
    max_model_len: int = 0
    context: int = 0
    streams: int = 0
    """Requests of `context` tokens that run at once, up to --max-num-seqs."""


def check_model(config: WorkerConfig, folder: Path, gpu: Gpu | None, context: int = 0, memory: int = 0) -> Report:
    """Return what a worker with `config` would do with the model in `folder`, which may have headers for weights.

    gpu: None: the CPU of this machine. context: tokens of a request; 0: the longest. memory: bytes of the device; 0: those of `gpu`, or
    what is free on this machine.
    """
    device = torch.device("cpu" if gpu is None else "cuda")
    total = memory or (free_memory() if gpu is None else gpu.total)
    report = Report(
        model=config.model,
        device="CPU" if gpu is None else gpu.name,
        devices=config.tensor_parallel_size,
        memory_bytes=total,
        context=context,
        uncounted=", ".join(
            flag
            for flag, is_set in (
                ("--lora-modules", bool(config.lora_modules)),
                ("--speculative-config", config.speculative_config is not None and bool(config.speculative_config.model)),
            )
            if is_set
        ),
    )
    try:
        if config.tensor_parallel_size == 1 and is_encoder(folder):
            return _check_encoder(report, config, folder, device)
        return _check_decoder(report, config, folder, gpu, device)
    except ModelLoadError as error:
        return replace(report, problem=error.cause)


def _check_encoder(report: Report, config: WorkerConfig, folder: Path, device: torch.device) -> Report:
    check_encoder_flags(config)
    plan = plan_encoder(config.model, folder, dtype=config.dtype, device=device)
    with torch.device("meta"):
        model = FAMILIES[plan.config.model_type](plan.config, len(plan.classifier.labels) if plan.classifier else 0).to(plan.dtype)
    on_host = device.type == "cpu"
    weights = host_weight_bytes(model, "none", None) if on_host else sum(each.nbytes for each in model.parameters())
    report = replace(
        report,
        model_type=plan.config.model_type,
        path="encoder",
        attention="torch, without padding",
        dtype=_name(plan.dtype),
        weight_bytes=weights,
        process_bytes=HOST_BYTES if on_host else GPU_BYTES,
        max_model_len=max_length(config.model, folder, model.max_length, config.max_model_len),
    )
    if weights + report.process_bytes > report.memory_bytes:
        return replace(report, problem=_too_large(report, weights, config))
    return replace(report, served=True, context=report.context or report.max_model_len)


def _check_decoder(report: Report, config: WorkerConfig, folder: Path, gpu: Gpu | None, device: torch.device) -> Report:
    plan = _plan(config, folder, device, report.context)
    ranks = config.tensor_parallel_size
    report = replace(
        report,
        model_type=plan.config.model_type,
        dtype=_name(plan.dtype),
        max_model_len=plan.max_model_len,
        context=report.context or plan.max_model_len,
    )
    kept = find_kept(config.model, folder, plan, gpu, config.dtype, config.quantization, ranks)
    if kept.dtype is not None:
        plan = replace(plan, dtype=kept.dtype)
    skeleton = make_skeleton(config.model, folder, plan, ranks, config.quantization)
    numbers = layers_with_kv(skeleton.model, skeleton.layers)
    scales = read_kv_scales(config.model, folder, plan.files, numbers) if config.kv_cache_dtype == "fp8" else None
    spec = KVSpec(skeleton.layers, config.page_size, plan.dtype, device, scales)
    attention, why = choose_backend(spec, has_flashinfer=True) if spec.layers else ("reference", "no layer has attention")
    if config.attention_backend not in ("auto", attention):
        attention, why = config.attention_backend, "--attention-backend"
    drafts = config.speculative_config is not None and bool(config.speculative_config.model)
    groups, one = choose_groups(spec, plan.max_model_len, drafts)
    spec = replace(spec, groups=() if skeleton.states else groups)
    report = replace(
        report,
        mechanisms=describe_mechanisms(plan.config, skeleton.layers, bool(skeleton.states)),
        attention=attention,
        attention_reason=why,
        dtype=_name(plan.dtype),
        quantization=kept.description if plan.gguf is None else "gguf",
        kv_dtype=_name(spec.kv_dtype),
        kv_groups=describe_groups(cache_groups(spec, plan.max_model_len), one),
        kv_bytes_per_token=spec.num_groups * spec.page_bytes // config.page_size,
        generates=skeleton.generates,
    )
    if config.kv_cache_dtype == "fp8" and gpu is None:
        raise ModelLoadError(config.model, "--kv-cache-dtype fp8 is for GPUs, and this is a CPU: leave it out, or give --gpu")
    path, reason = _path(config, plan, skeleton, attention, gpu)
    report = replace(report, path=path, path_reason=reason)
    if gpu is None:
        return _fit_host(report, config, plan, skeleton, spec)
    made = made_bytes(config.quantization) if not hasattr(plan.config, "quantization_config") else None
    return _fit_device(replace(report, weight_bytes=device_weight_bytes(skeleton, kept, made)), config, skeleton, spec, gpu)


def _plan(config: WorkerConfig, folder: Path, device: torch.device, context: int) -> LoadPlan:
    """Return the plan of the load; of a model that serves `context` only with a larger --max-model-len, the plan with that."""

    def plan(length: int) -> LoadPlan:
        return plan_load(
            config.model,
            folder,
            dtype=config.dtype,
            device=device,
            max_model_len=length,
            quantization=config.quantization,
            ranks=config.tensor_parallel_size,
        )

    found = plan(config.max_model_len)
    return found if context <= found.max_model_len else plan(context)


def _path(config: WorkerConfig, plan: LoadPlan, skeleton: Skeleton, attention: str, gpu: Gpu | None) -> tuple[str, str]:
    """Return the path of a step, and why it is not a faster one."""
    path = "layers" if isinstance(skeleton.model, Decoder) else "transformers"
    if gpu is not None:
        return path, ""
    if attention != "native":
        return path, f"attention backend {attention}"
    if config.tensor_parallel_size > 1:
        return path, "one native call cannot pause for the sums over ranks"
    if not config.native_decoder:
        return path, "FAIRLEAD_NATIVE_DECODER is off"
    refusal = native_refusal(skeleton, plan.dtype, config.page_size)
    return (path, refusal) if refusal else ("native", "")


def _fit_host(report: Report, config: WorkerConfig, plan: LoadPlan, skeleton: Skeleton, spec: KVSpec) -> Report:
    ranks = config.tensor_parallel_size
    if plan.gguf is not None and plan.dtype in (torch.float32, torch.bfloat16):
        weights = gguf_weight_bytes(plan.gguf, plan.config)
    else:
        weights = host_weight_bytes(skeleton.model, plan.native_quantization, skeleton.model.get_output_embeddings())
    report = replace(
        report, weight_bytes=weights, process_bytes=HOST_BYTES + HOST_TOKEN_BYTES * skeleton.model.get_input_embeddings().weight.shape[0]
    )
    steps = step_config(config, "cpu", report.max_model_len, skeleton.generates)
    report = replace(report, chunk_tokens=steps.chunked_prefill_size)
    free = report.memory_bytes - (report.process_bytes + weights) * ranks
    if free <= 0:
        return replace(report, problem=_too_large(report, weights, config))
    room = config.kv_cache_memory_bytes // ranks or host_kv_budget(free, ranks)
    return _fill(report, config, skeleton, spec, room)


def _fit_device(report: Report, config: WorkerConfig, skeleton: Skeleton, spec: KVSpec, gpu: Gpu) -> Report:
    steps = step_config(config, "cuda", report.max_model_len, skeleton.generates)
    step = StepMemory(skeleton, config.page_size)
    kinds = list(dict.fromkeys(spec.layers)) if report.attention == "flashinfer" else []
    rows = min(graph_rows(config, "cuda", False), config.max_num_seqs) if kinds and skeleton.generates else 0
    workspace = max(workspace_bytes(kinds, gpu.multiprocessors), graph_workspace_bytes(kinds, rows, gpu.multiprocessors)) if kinds else 0
    report = replace(report, process_bytes=GPU_BYTES + workspace, chunk_tokens=steps.chunked_prefill_size)
    memory = PredictedMemory(report.memory_bytes, report.process_bytes + report.weight_bytes, step.known())
    if not memory.free():
        return replace(report, problem=_too_large(report, report.weight_bytes, config))

    if chunk_seconds(config, "cuda", skeleton.generates):
        taken = memory.peak_of(lambda: step.run(StepLimits(LEAST_CHUNK, 0, min(LEAST_CHUNK, report.max_model_len))))
        chunk = largest_chunk(taken, memory.free(), steps.max_prefill_tokens)
        steps, report = replace(steps, chunked_prefill_size=chunk), replace(report, chunk_tokens=chunk)

    def attempt(tokens: int) -> None:
        step.run(StepLimits.from_config(limit_steps(steps, tokens, config.page_size), config.page_size))

    usual = StepLimits.from_config(replace(steps, idle_prefill_chunks=1), config.page_size).tokens
    tokens, least = StepLimits.from_config(steps, config.page_size).tokens, 2 * config.page_size
    if config.tensor_parallel_size > 1:
        tokens = least = usual  # as `RunnerBuilder` does
    try:
        found = profile_memory(memory, config.mem_fraction_static, tokens, least, attempt, usual)
    except MemoryError as error:
        return replace(report, problem=str(error))
    room = config.kv_cache_memory_bytes // config.tensor_parallel_size or max(0, found.kv_bytes - (GRAPH_BYTES if rows else 0))
    return _fill(replace(report, step_bytes=found.step_bytes, step_tokens=found.step_tokens), config, skeleton, spec, room)


def _fill(report: Report, config: WorkerConfig, skeleton: Skeleton, spec: KVSpec, room: int) -> Report:
    """Return the report with pages and states in `room` bytes, and the requests that these hold."""
    running, pages = config.max_num_seqs, config.kv_pages * spec.num_groups
    if skeleton.states:
        given = 0 if config.kv_pages else room
        try:
            slots = count_slots(skeleton.states, spec, running, config.limits.state_snapshots, given)
        except ValueError as error:
            return replace(report, problem=f"{error}: {_advice(report, config, False)}")
        running, room = slots.running, max(0, room - slots.all_bytes)
        report = replace(report, state_bytes=slots.all_bytes, kv_groups=describe_states(spec, slots))
    if not pages:
        pages = spec.pages_for(room) if spec.page_bytes else count_token_pages(report.max_model_len, config.page_size, running)
    longest = max(1, -(-(report.context - 1) // config.page_size))  # the last token's KV is never needed
    chunk = -(-report.chunk_tokens // config.page_size) if report.chunk_tokens > 0 else longest
    groups = cache_groups(spec, report.max_model_len)
    each, first = (longest, longest) if groups is None else (groups.pages(longest, config.page_size, more) for more in (0, chunk))
    report = replace(
        report,
        kv_bytes=pages * spec.page_bytes,
        kv_tokens=pages // spec.num_groups * config.page_size,
        streams=max(0, min(running, 1 + (pages - first) // each)),  # one of them computes its prompt
    )
    if not report.streams:
        needed = first * spec.page_bytes
        return replace(
            report,
            problem=f"a request of {report.context} tokens needs {_gib(needed)} of KV, and {_gib(pages * spec.page_bytes)} are left, for "
            f"{report.kv_tokens} tokens: {_advice(report, config, pages > 0)}",
        )
    return replace(report, served=True)


def _too_large(report: Report, weights: int, config: WorkerConfig) -> str:
    return (
        f"its weights take {_gib(weights)}, and {report.device} has {_gib(report.memory_bytes)}"
        f"{' for each of ' + str(report.devices) if report.devices > 1 else ''}: {_advice(report, config, False)}"
    )


def _advice(report: Report, config: WorkerConfig, shorter: bool) -> str:
    """Return what gives the model more room, as flags."""
    on_gpu = report.device != "CPU"
    found = [f"lower --max-model-len and --context to {report.kv_tokens}"] if shorter else []
    if config.kv_pages or config.kv_cache_memory_bytes:
        found.append("raise --kv-pages or --kv-cache-memory-bytes, or leave them out")
    if on_gpu and config.kv_cache_dtype == "auto" and shorter:
        found.append("give --kv-cache-dtype fp8")
    if config.quantization == "none" and report.quantization == "none" and report.path != "encoder":
        found.append(f"give --quantization {'fp8' if on_gpu else 'int8'}")
    if on_gpu and report.path != "encoder":
        found.append(f"give --gpus {2 * report.devices}")
    larger = next((gpu.name for gpu in sorted(GPUS.values(), key=lambda each: each.total) if gpu.total > report.memory_bytes), "")
    if on_gpu and larger:
        found.append(f"take a larger GPU (--gpu {larger})")
    if not on_gpu:
        found.append("take a machine with more memory")
    return ", or ".join(found)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
