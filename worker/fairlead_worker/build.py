"""Build model, adapters and runner from the configuration, the same on every rank. Imports torch late, because that takes seconds."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fairlead_worker.config import SpeculativeConfig, WorkerConfig
from fairlead_worker.ipc.messages import StepModes
from fairlead_worker.platform.cores import engine_threads

if TYPE_CHECKING:
    from pathlib import Path

    from fairlead_worker.execution.encoder_runner import EncoderRunner
    from fairlead_worker.execution.runner import ModelRunner
    from fairlead_worker.lora.adapters import AdapterSet
    from fairlead_worker.model.loader import LoadedModel, Locate
    from fairlead_worker.scheduler.config import SchedulerConfig
    from fairlead_worker.sharding.group import Group
    from fairlead_worker.weights.cache import ModelCache
    from fairlead_worker.weights.progress import Progress

logger = logging.getLogger(__name__)

SELF_EXPLANATORY = ("ModelLoadError", "AdapterError", "NotInvariant")
"""Names of exceptions whose message is complete without type and traceback. Names, because their modules are not imported here."""
MOST_REASON = 400
"""Characters of the reason for a fallback that other processes get."""
STEP_MS = 500.0
"""Longest planned step with decodes if `--itl-target-ms` is not set. Most are shorter (`docs/design/engine/chunk-size.md`)."""
IDLE_PREFILL_CHUNKS = 5
"""Chunks that a step may prefill while no request decodes."""
PIECEWISE_GRAPH_TOKENS = 2048
"""Of the largest step with prompts that runs as piecewise CUDA graphs, where launches are slow."""


def load(
    config: WorkerConfig,
    progress: "Progress | None" = None,
    cache: "ModelCache | None" = None,
    group: "Group | None" = None,
    locate: "Locate | None" = None,
) -> "LoadedModel":
    """Load the model of `config`, or this rank's shard of it if there is a `group`. Every rank passes the same configuration."""
    import torch

    from fairlead_worker.model.loader import FUSIONS, load_model
    from fairlead_worker.weights.progress import no_progress
    from fairlead_worker.weights.uri import resolve

    torch.set_num_threads(max(1, (config.threads or engine_threads()) // config.local_ranks))
    return load_model(
        config.model,
        dtype=config.dtype,
        device=group.device if group is not None else "cuda" if torch.cuda.is_available() else "cpu",
        max_model_len=config.max_model_len,
        quantization=config.quantization,
        pooling=config.pooling,
        matryoshka=config.matryoshka,
        fuse=FUSIONS if config.fuse == "auto" else (),
        kv_cache_dtype=config.kv_cache_dtype,
        progress=progress or no_progress,
        cache=cache,
        group=group,
        locate=locate or resolve,
    )


def build_encoder(config: WorkerConfig, folder: "Path", progress: "Progress") -> "EncoderRunner":
    """Load the encoder in `folder` and build its runner. Raises ModelLoadError, also for flags that only decoders have."""
    import torch

    from fairlead_worker.execution.encoder_runner import EncoderRunner
    from fairlead_worker.model.encoder import load_encoder

    check_encoder_flags(config)
    torch.set_num_threads(config.threads or engine_threads())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_encoder(
        config.model,
        folder,
        dtype=config.dtype,
        device=device,
        max_model_len=config.max_model_len,
        pooling=config.pooling,
        matryoshka=config.matryoshka,
        progress=progress,
    )
    return EncoderRunner(loaded)


def check_encoder_flags(config: WorkerConfig) -> None:
    """Raise ModelLoadError for flags that only decoders have."""
    from fairlead_worker.errors import ModelLoadError

    flags = {
        f"--quantization {config.quantization}": config.quantization != "none",
        "--deterministic": config.deterministic,
        "--speculative-config": config.speculative_config is not None,
        "--lora-modules": bool(config.lora_modules),
    }
    if wrong := [flag for flag, is_set in flags.items() if is_set]:
        raise ModelLoadError(config.model, f"{', '.join(wrong)}: not supported for an encoder; leave it out")


def encoder_steps(config: WorkerConfig, max_model_len: int) -> "SchedulerConfig":
    """Return the scheduler's configuration for an encoder: about a second of whole texts a step, of any prefix, and nothing cached."""
    steps = step_config(config, "", max_model_len, generates=False)
    return replace(steps, itl_target_ms=0, speculative_method="none", keeps_kv=False, dedupe_tokens=0, promise_limit=0)


def build_adapters(config: WorkerConfig, loaded: "LoadedModel", group: "Group | None" = None) -> "AdapterSet | None":
    """Build an empty set for the LoRA adapters of `loaded`, or None if LoRA is off. Every rank passes the same configuration."""
    from fairlead_worker.lora.adapters import AdapterSet

    if not config.max_loras:
        return None
    return AdapterSet(loaded, config.max_loras, config.max_lora_rank, growing=config.allow_runtime_lora_updating, group=group)


def build_runner(
    config: WorkerConfig,
    loaded: "LoadedModel",
    group: "Group | None" = None,
    draft: "LoadedModel | None" = None,
    adapters: "AdapterSet | None" = None,
    progress: "Progress | None" = None,
) -> "ModelRunner":
    """Build the runner of `loaded`. Every rank passes the same configuration.

    Only rank 0 has a draft model, because drafted tokens are sent with the steps.
    """
    from fairlead_worker.execution.runner_builder import RunnerBuilder
    from fairlead_worker.weights.progress import no_progress

    return RunnerBuilder(
        loaded=loaded,
        page_size=config.page_size,
        backend=config.attention_backend,
        native_decoder=config.native_decoder,
        kv_pages=config.kv_pages,
        kv_cache_bytes=config.kv_cache_memory_bytes // config.tensor_parallel_size,
        host_kv_cache_bytes=config.host_kv_cache_bytes // config.tensor_parallel_size,
        draft=draft,
        adapters=adapters,
        steps=scheduler_config(config, loaded),
        chunk_seconds=chunk_seconds(config, loaded.device.type, loaded.generates),
        mem_fraction_static=config.mem_fraction_static,
        graph_rows=graph_rows(config, loaded.device.type, group is None or group.rank == 0),
        piece_tokens=PIECEWISE_GRAPH_TOKENS,
        progress=progress or no_progress,
        group=group,
        state_snapshots=config.limits.state_snapshots,
        deterministic=config.deterministic,
    ).build()


def graph_rows(config: WorkerConfig, device: str, log_reason: bool = True) -> int:
    """Return the decodes of the largest CUDA graph; 0 if there can be none. `log_reason`: log why there are none."""
    most, reason = config.max_cudagraph_capture_size, _why_no_graphs(config, device)
    is_default = most == type(config).model_fields["max_cudagraph_capture_size"].default
    if reason and most and log_reason and not is_default:
        logger.warning("--max-cudagraph-capture-size %d is ignored: %s", most, reason)
    return 0 if reason else most


def _why_no_graphs(config: WorkerConfig, device: str) -> str:
    reasons = {
        "--deterministic (decodes are computed like prefills)": config.deterministic,
        f"a {device.upper()}": device != "cuda",
    }
    found = [name for name, applies in reasons.items() if applies]
    return f"no CUDA graphs with {', '.join(found)}" if found else ""


def _why_no_overlap(config: WorkerConfig, device: str, speculates: bool) -> str:
    """Return why steps cannot overlap. Features that need a step's tokens on the host before the next step use the plain loop."""
    if config.overlap == "off":
        return "--overlap off"
    if config.overlap == "auto" and device != "cuda":
        return f"nothing to gain on a {device.upper()}"
    reasons = {
        "--speculative-config": speculates,
        "--trace-schedule": bool(config.trace_schedule),
    }
    found = [name for name, applies in reasons.items() if applies]
    return f"each step is read before the next one is planned with {', '.join(found)}" if found else ""


def choose_modes(
    config: WorkerConfig,
    runner: "ModelRunner",
    steps: "SchedulerConfig",
    adapters: "AdapterSet | None" = None,
    progress: "Progress | None" = None,
) -> StepModes:
    """Return how the engine runs its steps, after a trial of CUDA graphs."""
    from fairlead_worker.execution.cuda_graphs.decodes import unsupported_reason
    from fairlead_worker.execution.trial import drop_decodes, try_graphs
    from fairlead_worker.weights.progress import no_progress

    device = runner.loaded.device.type
    no_overlap, no_graphs = _why_no_overlap(config, device, steps.speculative_method != "none"), _why_no_graphs(config, device)
    if not config.max_cudagraph_capture_size:
        no_graphs = "--max-cudagraph-capture-size 0"
    no_graphs = no_graphs or unsupported_reason(runner.backend).lstrip(": ")
    if not steps.generates:
        no_graphs = no_overlap = "the model has no language model head"
    elif no_overlap and config.overlap == "on":
        logger.warning("--overlap on is ignored: %s", no_overlap)
    adapter = next(iter(adapters.infos), 0) if adapters is not None else 0
    ranks = config.tensor_parallel_size
    no_pieces = f"--tensor-parallel-size {ranks}: rank 0 chooses graphs for decodes only" if ranks > 1 else ""
    had_pieces, failure = runner.pieces is not None, ""
    if steps.generates:
        failure = try_graphs(runner, adapter, progress or no_progress)
    else:
        drop_decodes(runner)
        runner.pieces = None
    fallback = "; ".join(reason for reason in (runner.graph_failure, failure) if reason)
    if runner.pieces is None:
        reason = failure if had_pieces else runner.graph_failure
        pieces = f"off: {no_graphs or no_pieces or reason or 'launches take no longer than the device'}"
    else:
        pieces = f"on: up to {runner.pieces.sizes[-1]} tokens"
    return StepModes(
        f"off: {no_graphs or fallback}" if runner.graphs is None else "on",
        f"off: {no_overlap}" if no_overlap else "on",
        fallback[:MOST_REASON],
        pieces,
    )


def chunk_seconds(config: WorkerConfig, device: str, generates: bool) -> float:
    """Return the most seconds of a chunk whose size is measured; 0: it is fixed, as no step is measured with a given KV size.

    device: cpu or cuda.
    """
    fixed = config.chunked_prefill_size or config.kv_pages or config.kv_cache_memory_bytes
    return 0.0 if fixed or device != "cuda" or not generates else (config.itl_target_ms or STEP_MS) / 1000


def scheduler_config(config: WorkerConfig, loaded: "LoadedModel") -> "SchedulerConfig":
    """Return the scheduler's configuration for this model, before its chunks are measured and it is limited to the available memory."""
    return step_config(config, loaded.device.type, loaded.max_model_len, loaded.generates, loaded.eos_token_ids)


def check_states(config: WorkerConfig, loaded: "LoadedModel") -> None:
    """Raise ModelLoadError for settings that a model with recurrent layers cannot have."""
    from fairlead_worker.errors import ModelLoadError

    if not loaded.states:
        return
    if config.deterministic:
        raise ModelLoadError(config.model, "--deterministic is not served for recurrent layers: their sums depend on where a chunk begins")
    if config.speculative_config is not None and config.speculative_config.model and not loaded.layers:
        raise ModelLoadError(config.model, 'it has no pages of KV for a draft model; set "method": "ngram" in --speculative-config')


def step_config(
    config: WorkerConfig, device: str, max_model_len: int, generates: bool, eos_token_ids: tuple[int, ...] = ()
) -> "SchedulerConfig":
    """Return the same for a model with these properties. device: cpu or cuda."""
    from fairlead_worker.scheduler.config import LEAST_CHUNK, SchedulerConfig

    chunk = config.chunked_prefill_size or LEAST_CHUNK
    # Without a target, a CPU still bounds steps, as long prefill chunks would stall its decodes.
    bounded = device == "cpu" and chunk > 0 and not config.itl_target_ms
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        chunked_prefill_size=chunk,
        idle_prefill_chunks=IDLE_PREFILL_CHUNKS,
        max_prefill_tokens=config.max_prefill_tokens,
        prefill_max_requests=config.prefill_max_requests,
        enable_mixed_chunk=config.enable_mixed_chunk,
        itl_target_ms=STEP_MS if bounded else config.itl_target_ms,
        chunks_grow=not bounded,
        policy=config.scheduling_policy,
        eos_token_ids=eos_token_ids,
        generates=generates,
        **_speculation(config.speculative_config),
    )


def _speculation(config: SpeculativeConfig | None) -> dict[str, Any]:
    """Return the scheduler's settings of speculative decoding; none if it is off."""
    if config is None:
        return {}
    return {
        "speculative_method": "ngram" if config.method == "ngram" else "draft",
        "speculative_num_tokens": config.num_speculative_tokens,
        "speculative_ngram_min": config.prompt_lookup_min,
        "speculative_ngram_max": config.prompt_lookup_max,
    }


def describe_error(error: Exception) -> str:
    """Return one line that says why the engine could not start."""
    text = " ".join(str(error).split())
    return text if type(error).__name__ in SELF_EXPLANATORY else f"the engine could not start: {type(error).__name__}: {text}"
