"""The engine process: loads the model, reports progress, runs the loop. `api/engine/child.py` starts it, and it ends with its parent.

`python -m fairlead_worker.engine_process` reads one line of JSON (`Start`) from standard input and continues reading. End of file means
that the parent has ended, and ends this process. Exit status: 0 after `Stop`, 1 after `Failed`.
"""

import gc
import logging
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fairlead_common.memory import trim_heap
from fairlead_common.telemetry.logs import configure_logging
from fairlead_worker.build import (
    SELF_EXPLANATORY,
    build_adapters,
    build_encoder,
    build_runner,
    check_states,
    choose_modes,
    describe_error,
    encoder_steps,
    load,
    scheduler_config,
)
from fairlead_worker.config import WorkerConfig
from fairlead_worker.config.api_files import read_file
from fairlead_worker.ipc.messages import Failed, Loading, Pooling, Ready, Start, StepModes
from fairlead_worker.ipc.transport import ZmqEngineEnd
from fairlead_worker.parallel.ranks import GRACE_SECONDS, Ranks
from fairlead_worker.platform.processes import end_with_parent, open_parent_pipe

if TYPE_CHECKING:
    from fairlead_common.prompts.encoder import PromptFormat
    from fairlead_worker.engine.loop import Adapters, EngineEnd
    from fairlead_worker.engine.schedule_trace import ScheduleTrace
    from fairlead_worker.execution.encoder_runner import EncoderRunner
    from fairlead_worker.execution.runner import ModelRunner
    from fairlead_worker.sampling.grammars import Grammars
    from fairlead_worker.scheduler.scheduler import Scheduler
    from fairlead_worker.weights.cache import ModelCache
    from fairlead_worker.weights.progress import Progress

logger = logging.getLogger(__name__)

TRIAL_SECONDS = 120.0
"""Limit of the start-up trial of a sharded model."""
TRIAL_HANGS = (
    f"the start-up trial of CUDA graphs hangs for {TRIAL_SECONDS:g} s: ranks wait for each other; set --max-cudagraph-capture-size 0"
)


def main() -> int:
    """Run the engine and return the process's exit status."""
    parent_pipe = open_parent_pipe()
    start = msgspec.json.decode(parent_pipe.readline(), type=Start)
    config = WorkerConfig.model_validate(start.config)
    configure_logging(config.log_level, config.log_format, sys.stderr, "%(asctime)s %(levelname)s engine %(name)s: %(message)s", "engine")
    end_with_parent(parent_pipe, start.address)
    end = ZmqEngineEnd(start.address)
    try:
        return run(config, end, start.address)
    finally:
        end.close()


def run(config: WorkerConfig, end: "EngineEnd", folder: str | None = None) -> int:
    """Build the engine and serve until `Stop` (returns 0) or a failure (returns 1).

    `folder`: for sockets; None: the system's temporary folder.
    """
    try:
        ranks = Ranks(config, end, folder) if config.tensor_parallel_size > 1 else None
    except OSError as error:
        end.send(Failed(reason=f"cannot listen for the other nodes at --master-addr {config.master_addr}: {error.strerror or error}"))
        return 1
    status = 1
    try:
        status = _build_and_serve(config, end, ranks)
    finally:
        if ranks is not None:
            ranks.close(0 if status else GRACE_SECONDS)
    return status


def _build_and_serve(config: WorkerConfig, end: "EngineEnd", ranks: Ranks | None) -> int:
    try:
        with nullcontext() if ranks is None else ranks.collective():
            scheduler, runner, ready, adapters = build(config, end, ranks)
    except Exception as error:
        if type(error).__name__ not in SELF_EXPLANATORY:
            logger.exception("the engine could not start")
        end.send(Failed(reason=(f"rank 0 of {ranks.size}: " if ranks is not None else "") + describe_error(error)))
        return 1
    from fairlead_worker.engine.loop import run_plain
    from fairlead_worker.engine.overlap import run_overlapped
    from fairlead_worker.engine.request_timer import RequestTimer
    from fairlead_worker.execution.overlap import OverlappedRunner
    from fairlead_worker.execution.runner import ModelRunner

    try:
        timer = RequestTimer(_open_trace(config, ready))
    except OSError as error:
        end.send(Failed(reason=f"--trace-schedule {config.trace_schedule} cannot be written: {error.strerror}"))
        return 1
    # The objects created so far live as long as the process. Without the freeze, each full collection traversed them (400,000 objects of
    # torch and transformers) and stopped every stream for 0.2 seconds.
    gc.collect()
    gc.freeze()
    trim_heap()  # 240 MiB of a load with Gemma's vocabulary
    end.send(ready)
    try:
        if ready.modes.overlap == "on" and isinstance(runner, ModelRunner):
            return run_overlapped(scheduler, OverlappedRunner(runner), end, timer, adapters, runner.grammars)
        return run_plain(scheduler, runner, end, timer, adapters, runner.grammars)
    finally:
        timer.close()


def build(
    config: WorkerConfig, end: "EngineEnd", ranks: Ranks | None = None
) -> "tuple[Scheduler, ModelRunner | EncoderRunner, Ready, Adapters | None]":
    """Build scheduler, runner and adapters from the configuration, and report progress. The first phase, importing torch, takes seconds."""
    end.send(Loading(phase="imports", percent=0))
    from fairlead_worker.model.lean import import_transformers

    import_transformers()
    from fairlead_index.hashing import extend
    from fairlead_worker.cache.make import make_cache
    from fairlead_worker.cache.pages import PagePool
    from fairlead_worker.kernels.groups import cache_groups
    from fairlead_worker.lora.source import adapter_folder
    from fairlead_worker.model.draft import load_draft
    from fairlead_worker.model.encoder import is_encoder
    from fairlead_worker.model.generation_config import find_defaults
    from fairlead_worker.parallel.lead import LedAdapters, lead
    from fairlead_worker.platform.isa import cpu_level
    from fairlead_worker.scheduler.limits import limit_steps
    from fairlead_worker.scheduler.scheduler import Scheduler
    from fairlead_worker.sharding.group import check_devices
    from fairlead_worker.weights.cache import ModelCache
    from fairlead_worker.weights.uri import resolve

    cache = ModelCache(Path(config.model_cache), config.pod) if config.model_cache else None
    group = None
    if ranks is None:
        folder = resolve(config.model, _progress_reporter(end), cache)
        if is_encoder(folder):
            return *_build_encoder(config, end, folder), None
        loaded = load(config, _progress_reporter(end), cache, locate=lambda *_: folder)
    else:
        check_devices(config)
        group = ranks.join()
        loaded = load(config, _progress_reporter(end), cache, group, partial(_locate_for_all, ranks))
        ranks.loaded()
        if config.nnodes > 1:
            group.check_same(config.model, loaded.digest)
    check_states(config, loaded)
    draft = None
    if (speculative := config.speculative_config) is not None and speculative.model:
        report = _progress_reporter(end, "of the draft model")
        draft = load_draft(
            speculative.model, loaded, dtype=config.dtype, quantization=speculative.quantization, progress=report, cache=cache
        )
    # Before the KV cache, which takes the remaining memory.
    adapters = build_adapters(config, loaded, group)
    for number, (name, uri) in enumerate(config.loras.items(), 1):
        end.send(Loading(phase="adapters", percent=100 * (number - 1) // len(config.lora_modules), detail=name))
        assert adapters is not None, "the configuration allows no more adapters than --max-loras"
        files = adapter_folder(name, uri, _progress_reporter(end, f"of adapter {name}"), cache)
        if ranks is not None:
            ranks.fetched(number, files)
        adapters.load(number, name, uri, files)
    if config.deterministic:
        from fairlead_worker.execution.batch_invariance import check_invariance, configure_torch
        from fairlead_worker.model.fixed_rows import fix_rows

        configure_torch(loaded.device)
        fix_rows(loaded.model)
    runner = build_runner(config, loaded, group, draft, adapters, _progress_reporter(end))
    if config.deterministic:
        check_invariance(runner)
    if ranks is not None and group is not None:
        lead(runner, ranks, group)
    steps = replace(scheduler_config(config, loaded), prompt_logprobs=runner.forward.can_score)
    if runner.chunk_tokens:
        steps = replace(steps, chunked_prefill_size=runner.chunk_tokens)
    if runner.step_tokens:
        steps = limit_steps(steps, runner.step_tokens, config.page_size)
    if runner.state_slots is not None:
        steps = replace(steps, max_num_seqs=min(steps.max_num_seqs, runner.state_slots.running))
    kv = make_cache(
        PagePool(runner.backend.pages, config.page_size),
        config.block_tokens,
        extend,
        host_slots=runner.host.slots if runner.host else 0,
        groups=cache_groups(runner.backend.spec, loaded.max_model_len),
        chunk_tokens=max(steps.chunked_prefill_size, config.page_size) if steps.chunked_prefill_size > 0 else 0,
        states=runner.state_slots,
    )
    scheduler = Scheduler(steps, kv)
    # A request longer than the KV cache can never run.
    longest = min(loaded.max_model_len, kv.longest * config.page_size)
    prompt_format = _load_prompt_format(config, loaded.path, loaded.digest, longest)
    with nullcontext() if ranks is None else ranks.limit(TRIAL_SECONDS, TRIAL_HANGS):
        modes = choose_modes(config, runner, steps, adapters, _progress_reporter(end))
    _run_first_steps(config, scheduler, runner, longest, end)
    runner.grammars = _build_grammars(config, prompt_format, loaded.vocabulary_size, loaded.eos_token_ids, bool(loaded.states), end)
    ready = Ready(
        max_model_len=longest,
        page_size=config.page_size,
        pages=kv.pool.total // kv.units,
        model_digest=loaded.digest,
        vocabulary_size=loaded.vocabulary_size,
        eos_token_ids=loaded.eos_token_ids,
        backend=runner.attention,
        cpu_level=cpu_level() if loaded.device.type == "cpu" else "",
        decoder=runner.path,
        kv_groups=runner.kv_groups,
        chunked_prefill_size=steps.chunked_prefill_size,
        modes=modes,
        prompt_format=msgspec.json.encode(prompt_format),
        sampling_defaults=find_defaults(config.generation_config, loaded.path),
        adapters=tuple(adapters.infos.values()) if adapters is not None else (),
        pooling=loaded.pooling
        if runner.forward.can_score
        else Pooling(refused="the hidden states of this model cannot be separated from its head"),
        generates=loaded.generates,
    )
    return scheduler, runner, ready, adapters if adapters is None or ranks is None else LedAdapters(adapters, ranks)


def _build_encoder(config: WorkerConfig, end: "EngineEnd", folder: Path) -> "tuple[Scheduler, EncoderRunner, Ready]":
    """Build scheduler and runner of an encoder. It has no KV: the pages are only counted, and suffice for every step."""
    from fairlead_index.hashing import extend
    from fairlead_worker.cache.pages import PagePool
    from fairlead_worker.cache.prefix import PrefixCache
    from fairlead_worker.platform.isa import cpu_level
    from fairlead_worker.scheduler.limits import StepLimits
    from fairlead_worker.scheduler.scheduler import Scheduler

    runner = build_encoder(config, folder, _progress_reporter(end))
    loaded, page_size = runner.loaded, config.page_size
    steps = encoder_steps(config, loaded.max_model_len)
    pages = -(-StepLimits.from_config(steps, page_size).prefill // page_size) + steps.max_num_seqs
    scheduler = Scheduler(steps, PrefixCache(PagePool(pages, page_size), config.block_tokens, extend))
    _run_first_steps(config, scheduler, runner, loaded.max_model_len, end)
    off = "off: an encoder has no decodes"
    ready = Ready(
        max_model_len=loaded.max_model_len,
        page_size=page_size,
        pages=pages,
        model_digest=loaded.digest,
        vocabulary_size=loaded.vocabulary_size,
        backend=type(loaded.model).__name__,
        cpu_level=cpu_level() if loaded.device.type == "cpu" else "",
        modes=StepModes(cuda_graphs=off, overlap=off, piecewise_graphs=off),
        prompt_format=msgspec.json.encode(_load_prompt_format(config, folder, loaded.digest, loaded.max_model_len)),
        pooling=loaded.pooling,
        generates=False,
        is_encoder=True,
        kv_groups="none: an encoder keeps no KV",
        classifier=loaded.classifier,
    )
    return scheduler, runner, ready


def _run_first_steps(
    config: WorkerConfig, scheduler: "Scheduler", runner: "ModelRunner | EncoderRunner", longest: int, end: "EngineEnd"
) -> None:
    """Run steps of the model as it is served, after all that the load replaces in it. Raises ModelLoadError if one fails."""
    from fairlead_worker.engine.warmup import warm_up
    from fairlead_worker.errors import ModelLoadError

    end.send(Loading(phase="warmup", percent=0))
    try:
        warm_up(scheduler, runner, longest)
    except Exception as error:  # whatever a family's own code raises
        logger.exception("a step of the warm-up failed")
        raise ModelLoadError(config.model, f"a step of the warm-up failed: {type(error).__name__}: {error}") from error


def _locate_for_all(ranks: Ranks, uri: str, progress: "Progress", cache: "ModelCache | None") -> Path:
    """Return the folder of the model's files, downloaded once for all ranks of this node. Raises ModelLoadError."""
    from fairlead_worker.weights.uri import resolve

    folder = resolve(uri, progress, cache)
    ranks.load(folder)
    return folder


def _progress_reporter(end: "EngineEnd", detail: str = "") -> "Progress":
    def report(phase: str, percent: int, done: int = 0, total: int = 0, note: str = "") -> None:
        end.send(Loading(phase=phase, percent=percent, detail=f"{note} {detail}".strip(), done=done, total=total))

    return report


def _open_trace(config: WorkerConfig, ready: Ready) -> "ScheduleTrace | None":
    from fairlead_worker.engine.schedule_trace import ScheduleTrace

    if not config.trace_schedule:
        return None
    about = {
        "model": config.names[0],
        "page_size": ready.page_size,
        "pages": ready.pages,
        "chunked_prefill_size": ready.chunked_prefill_size,
        "policy": config.scheduling_policy,
    }
    return ScheduleTrace(Path(config.trace_schedule), about)


def _build_grammars(
    config: WorkerConfig, prompt_format: "PromptFormat", vocabulary: int, eos: tuple[int, ...], waits: bool, end: "EngineEnd"
) -> "Grammars | None":
    """Return the grammars of structured output, or None if it is turned off or does not support the tokenizer."""
    from fairlead_worker.grammar.compiler import Compiler, GrammarError
    from fairlead_worker.sampling.grammars import Grammars

    if not config.limits.max_grammar_bytes:
        return None
    end.send(Loading(phase="grammars", percent=0))
    try:
        compiler = Compiler(prompt_format.tokenizer_json, vocabulary, eos)
    except GrammarError as error:
        logger.warning("structured output is refused: %s", error)
        return None
    return Grammars(compiler, timeout=config.limits.grammar_timeout, waits=waits)


def _load_prompt_format(config: WorkerConfig, folder: Path, model_digest: str, max_model_len: int) -> "PromptFormat":
    from fairlead_common.errors import PromptError
    from fairlead_common.prompts.encoder import PromptFormat
    from fairlead_common.prompts.messages import check_template
    from fairlead_worker.errors import ModelLoadError
    from fairlead_worker.parsing.tool_template import build_tool_template
    from fairlead_worker.weights.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(folder)
    except Exception as error:
        raise ModelLoadError(config.model, f"its tokenizer cannot be loaded: {error}") from error
    if config.chat_template:
        try:
            tokenizer.chat_template = read_file(config.chat_template)
        except ValueError as error:  # it was valid when the worker started
            raise ModelLoadError(config.model, f"--chat-template {config.chat_template} {error}") from error
    format = PromptFormat.from_tokenizer(
        tokenizer,
        model_digest=model_digest,
        model_names=config.names,
        block_tokens=config.block_tokens,
        max_model_len=max_model_len,
        model_uri=config.model,
    )
    load_tokenizer.cache_clear()
    format = msgspec.structs.replace(format, tool_template=format.tool_template or build_tool_template(format.chat_template))
    try:
        for template in filter(None, (format.chat_template, format.tool_template)):
            check_template(template)
    except PromptError as error:
        raise ModelLoadError(config.model, error.reason) from error
    return format


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # torch's exit handlers take one to two seconds of a pod's grace period, and there is nothing left to save
