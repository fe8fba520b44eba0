"""A minimal router on FastAPI and aiohttp: `python_router.py PORT WORKER_URL`.

It stands for production-stack's router (vLLM), which is built so (its request service reads the body as JSON, sends it on with aiohttp and
streams `iter_any()` back) and has no wheel: what PyPI calls vllm-router is another, in Rust. Statistics, discovery and logs of the real one
are left out, to its favour. Packages as it pins them, so uvicorn runs on h11 and asyncio.
"""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

PORT, WORKER = int(sys.argv[1]), sys.argv[2]
NOT_PASSED = {"host", "connection", "keep-alive", "transfer-encoding", "content-length"}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as app.state.session:
        yield


app = FastAPI(lifespan=lifespan)


async def relay(request: Request, body: bytes) -> AsyncIterator[Any]:
    """Yield status and headers, then the parts of the body."""
    headers = {name: value for name, value in request.headers.items() if name not in NOT_PASSED}
    forever = aiohttp.ClientTimeout(total=None)
    async with app.state.session.post(WORKER + request.url.path, headers=headers, data=body, timeout=forever) as answer:
        yield answer.status, answer.headers
        async for piece in answer.content.iter_any():
            yield piece


@app.post("/v1/completions")
async def complete(request: Request) -> StreamingResponse:
    body = await request.body()
    json.loads(body)
    pieces = relay(request, body)
    status, headers = await anext(pieces)
    passed = {name: value for name, value in headers.items() if name.lower() not in NOT_PASSED}
    return StreamingResponse(pieces, status_code=status, headers=passed)


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="error", access_log=False)
