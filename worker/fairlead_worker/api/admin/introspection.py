"""vLLM's `/server_info`, `/tokenizer_info` and `/reset_prefix_cache`, on the admin port."""

import msgspec

from fairlead_worker.api.answers.worker import DroppedPages, ServerInfo, TokenizerInfo
from fairlead_worker.api.errors import unavailable
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.worker import Worker
from fairlead_worker.platform.version import release


async def server_info(worker: Worker, context: RequestContext) -> None:
    """Return the version and every setting, without passwords."""
    info = ServerInfo(version=release(), settings=worker.config.describe_settings())
    if worker.serving:
        ready = worker.ready
        info = msgspec.structs.replace(
            info,
            system_fingerprint=worker.system_fingerprint,
            max_model_len=worker.max_model_len,
            attention_backend=ready.backend,
            cpu_level=ready.cpu_level,
            decoder=ready.decoder,
            kv_groups=ready.kv_groups,
            chunked_prefill_size=ready.chunked_prefill_size,
            **msgspec.to_builtins(ready.modes),
        )
    await context.respond_json(info)


async def tokenizer_info(worker: Worker, context: RequestContext) -> None:
    """Return the tokenizer's settings: special tokens, templates and sizes. `/internal/prompt-format` has the whole tokenizer."""
    worker.check_loaded()
    format = worker.encoder.format
    info = TokenizerInfo(
        tokenizer_digest=format.tokenizer_digest,
        vocab_size=worker.encoder.vocabulary_size,
        model_max_length=worker.max_model_len,
        chat_template=format.chat_template,
        tool_chat_template=format.tool_template,
    )
    await context.respond_json(format.special_tokens | msgspec.to_builtins(info))


async def reset_prefix_cache(worker: Worker, context: RequestContext) -> None:
    """Drop all cached KV that no request uses, and answer once it is gone. Running requests keep theirs."""
    if not worker.serving:
        raise unavailable("the model is not loaded yet")
    await context.respond_json(DroppedPages(await worker.engine.reset_prefix_cache()))
