"""Publishes KV events with SGLang's own classes, in an environment with its package: `sglang_publisher.py ENDPOINT REPLAY`.

Each line of stdin is a batch of events in the form of `engine_pool`. Its number is printed when it has been sent.
"""

import json
import sys
import time
import types
from importlib.util import find_spec
from pathlib import Path


def import_modules() -> tuple[types.ModuleType, types.ModuleType]:
    """Return SGLang's modules of the wire format and of its recorder, without its packages' own imports: these need CUDA kernels."""
    spec = find_spec("sglang")
    assert spec is not None and spec.origin is not None
    site = Path(spec.origin).parents[1]
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.utils", "sglang.srt.arg_groups", "sglang.srt.mem_cache"):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [str(site.joinpath(*name.split(".")))]
    unused = sys.modules["sglang.srt.mem_cache.utils"] = types.ModuleType("sglang.srt.mem_cache.utils")  # hashes of its tree's nodes
    for function in ("compute_node_event_hash_values", "compute_node_hash_values", "hash_str_to_int64"):
        setattr(unused, function, None)
    from sglang.srt.disaggregation import kv_events
    from sglang.srt.mem_cache import events

    return kv_events, events


def main() -> None:
    kv_events, recorder_module = import_modules()
    publisher = kv_events.ZmqEventPublisher(0, endpoint=sys.argv[1], replay_endpoint=sys.argv[2])
    recorder = recorder_module.KVCacheEventRecorder(enabled=True, page_size=4)
    gpu = kv_events.StorageMedium.GPU
    for number, line in enumerate(sys.stdin):
        for event in json.loads(line):
            if event["type"] == "BlockRemoved":
                recorder.enqueue(kv_events.BlockRemoved(block_hashes=event["block_hashes"], medium=gpu))
                continue
            above, size = event["parent_block_hash"], event["block_size"]
            for index, name in enumerate(event["block_hashes"]):  # one page at a time, as SGLang records them
                tokens = event["token_ids"][index * size : (index + 1) * size]
                stored = kv_events.BlockStored(
                    block_hashes=[name],
                    parent_block_hash=above,
                    token_ids=tokens,
                    block_size=size,
                    lora_id=None,
                    medium=gpu,
                    cache_salt=event["salt"] or None,
                    lora_name=event["lora_name"],
                )
                recorder.enqueue(stored)
                above = name
        publisher.publish(kv_events.KVEventBatch(ts=time.time(), events=recorder.take()))
        print(number, flush=True)


if __name__ == "__main__":
    main()
