"""Record the GPU work of a function as CUDA graphs, in one piece or in several, and replay it on the same memory."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from typing import Protocol, TypeVar

import torch

from fairlead_worker.sharding.group import Group

T = TypeVar("T")
Cut = Callable[[Callable[[], None]], None]
"""Ends a piece of a recording and begins the next one. A replay calls the given function between the two."""


class Recorder(Protocol):
    """Recorder of graphs."""

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run `run` once for real, then record it. The returned function replays it on the same memory and returns the same tensor."""
        ...

    def record_pieces(self, run: Callable[[Cut], T]) -> Callable[[], T]:
        """Record `run` as `record` does, in one piece more than it calls `cut`.

        Memory of a piece may be used by the next ones, so a function between them reads and writes memory from outside the recording.
        """
        ...


class CudaRecorder:
    """CUDA graphs that share one memory pool: replays follow each other, and the result of one is read before the next starts.

    All graphs and their warm-up runs use one stream: torch keeps memory blocks, and cuBLAS its workspace (32 MiB on Hopper), for each
    stream that they were ever used on.
    """

    def __init__(self, group: Group | None = None) -> None:
        """`group`: of a sharded model; None: of a whole one, also a draft model beside a sharded one."""
        self._group = group
        # Of a sharded model, threads of NCCL and of torch's watchdog use CUDA during a capture (vllm-project/vllm#46253).
        self._mode = "thread_local" if group is not None or torch.distributed.is_initialized() else "global"
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return self.record_pieces(lambda cut: run())

    def record_pieces(self, run: Callable[[Cut], T]) -> Callable[[], T]:
        compute, side = torch.cuda.current_stream(), self._side
        steps: list[Callable[[], None]] = []
        piece = ExitStack()

        def begin() -> None:
            graph = torch.cuda.CUDAGraph()
            piece.enter_context(torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode=self._mode))
            steps.append(graph.replay)

        def cut(between: Callable[[], None]) -> None:
            piece.close()
            steps.append(between)
            begin()

        try:
            side.wait_stream(compute)
            # `torch.cuda.graph` alone leaves its stream current if the capture cannot begin (torch 2.15), or cannot end (earlier ones).
            with torch.cuda.stream(side):
                with nullcontext() if self._group is None else self._group.rehearse():
                    run(lambda between: between())  # libraries initialise at their first call, which must not be recorded
                with piece:
                    begin()
                    output = run(cut)
            compute.wait_stream(side)
        except Exception:
            self._replace_pool()
            raise

        def replay() -> T:
            for step in steps:
                step()
            return output

        return replay

    def _replace_pool(self) -> None:
        """Take another pool and stream after a failed capture.

        torch refuses the pool of a failed capture, or leaks it (pytorch#190308). Before pytorch#180395 it also goes on recording to that
        pool, and then `empty_cache` fails.
        """
        with suppress(RuntimeError):  # raised where the pool is not recording any more
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch
        torch.cuda.synchronize()  # eager steps follow on another stream, and use the same workspace
