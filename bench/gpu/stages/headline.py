"""Stage: the headline figures, of an 8B shape: decodes of 64 streams at a context of 2k, and a prompt of 8k, as a worker runs them."""

from collections.abc import Iterator
from typing import Any

from bench.gpu.device import Device
from bench.gpu.model import scheduler_for, submit
from bench.gpu.report import beside
from bench.gpu.roofline import beside_roofline, decode_work, prefill_work, rates_of
from bench.gpu.shared_model import Kit
from bench.gpu.stages.overlap import decode
from fairlead_worker.execution.trial import try_graphs
from fairlead_worker.ipc.messages import Sampling


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """The device's rates; whether the worker's start-up trial passes; then tokens a second beside the roofline."""
    streams, context, new, prompt = (64, 2048, 32, 8128) if not device.tiny else (3, 24, 6, 40)
    shape, rates = "tiny" if device.tiny else "8b", rates_of(device)
    yield {"what": "this device", "tb_per_s": rates.bytes_per_s / 1e12, "tflops": rates.flops_per_s / 1e12, "source": rates.source}
    runner = kit.shared(streams * -(-(context + new + 16) // 16) + 64, streams)
    recorded = runner.graphs
    try:
        failure = try_graphs(runner)
        yield {"what": "CUDA graphs pass the start-up trial", "ok": not failure} | ({"said": failure} if failure else {})
        seconds = decode(device, runner, streams, context, new, True)[0] / (new - 1)
        row = {"what": f"decode, {streams} streams at {context} tokens", "tokens_per_s": streams / seconds, "step_ms": seconds * 1e3}
        row = beside_roofline(row, rates, decode_work(shape, streams, context + new / 2), seconds)
        yield beside(row, "of_roofline", least=0.8)
        scheduler = scheduler_for(runner, chunked_prefill_size=0)
        submit(scheduler, 0, range(10, 10 + prompt), Sampling(max_tokens=1, temperature=0, ignore_eos=True))
        plan = scheduler.plan()
        seconds = device.seconds(lambda: runner.execute(plan), 3)
        row = {"what": f"a prompt of {prompt}", "tokens_per_s": prompt / seconds, "ms": seconds * 1e3}
        work = prefill_work(shape, prompt)
        yield beside(beside_roofline(row, rates, work, seconds) | {"tflops": work[1] / seconds / 1e12}, "of_roofline", least=0.65)
    finally:
        runner.graphs = recorded
