"""A router with an endpoint picker, and a client of it, for tests."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from tests.router.gateway import Gateway, gateway
from tests.router.harness import Fleet, RunningRouter
from tests.router.stand_in_worker import StandIn

PATH = "/v1/completions"


def prompt(text: str = "hello there", **fields: Any) -> bytes:
    return json.dumps({"model": "stand-in", "prompt": text, **fields}).encode()


@asynccontextmanager
async def picking(fleet: Fleet, *workers: StandIn, **settings: Any) -> AsyncIterator[tuple[RunningRouter, Gateway]]:
    router = await fleet.router(*workers, **{"picker_port": 0, "picker_tls": "off"} | settings)
    assert router.server.router.picker is not None
    async with gateway(router.server.router.picker.port) as asking:
        yield router, asking


def in_flight(router: RunningRouter) -> int:
    return sum(worker.in_flight for worker in router.table)


async def refuses(asking: Gateway) -> bool:
    try:
        await HealthStub(asking.channel).Check(HealthCheckRequest())
    except grpc.aio.AioRpcError:
        return True
    return False
