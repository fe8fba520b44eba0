"""The channel between the API process and the engine, over real sockets."""

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

from fairlead_worker.ipc.messages import Loading, Sampling, Step, Stop, Submit, ToEngine
from fairlead_worker.ipc.transport import ZmqChannel, ZmqEngineEnd

SENDERS, MESSAGES = 8, 10_000

# In a process of its own: what goes wrong here is ZeroMQ's abort.
PROGRAM = f"""
import asyncio, sys, threading
from fairlead_worker.ipc.messages import Loading
from fairlead_worker.ipc.transport import ZmqChannel, ZmqEngineEnd

async def main():
    channel = ZmqChannel()
    end = ZmqEngineEnd(channel.address)

    def report():
        for percent in range({MESSAGES}):
            end.send(Loading(phase="download", percent=percent))

    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=report) for _ in range({SENDERS})]
    for thread in threads:
        thread.start()
    total = 0
    async with asyncio.timeout(50):
        for _ in range({SENDERS} * {MESSAGES}):
            total += (await channel.receive()).percent
    for thread in threads:
        thread.join()
    end.close()
    channel.close()
    print(total)

asyncio.run(main())
"""


def test_progress_may_come_from_many_threads() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == SENDERS * sum(range(MESSAGES))


ENGINE = """
import array, sys
from fairlead_worker.ipc.messages import CacheEvent, Loading, Step, Submit
from fairlead_worker.ipc.transport import ZmqEngineEnd

end = ZmqEngineEnd(sys.argv[1])
end.send(Loading(phase="first", percent=0))
(submit,) = end.receive(30.0)
assert isinstance(submit, Submit) and len(submit.tokens) == 48 << 20
end.send(Step(events=(CacheEvent("stored", submit.tokens),)))
end.send(Step())
(last,) = end.receive(30.0)
end.send(Step(events=(CacheEvent("stored", bytes(512 << 20)),)))
print("sending", flush=True)
sys.stdin.read()
"""


async def _talk() -> None:
    channel = ZmqChannel()
    engine = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENGINE, channel.address, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert engine.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert await channel.receive() == Loading(phase="first", percent=0)
            tokens = bytes(48 << 20)
            channel.send(Submit("a", tokens, Sampling(max_tokens=1), 1))
            large, small = await channel.receive(), await channel.receive()
            assert isinstance(large, Step) and large.events[0].hashes == tokens and small == Step()
            for _ in range(3):  # a receiver that stopped waiting has taken no message
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(channel.receive(), 0.01)
            channel.send(Stop())
            assert await engine.stdout.readline() == b"sending\n"
            engine.kill()  # in the middle of half a gigabyte
            await engine.wait()
        # What came is a whole message or none, and the channel lives on for another engine.
        with contextlib.suppress(TimeoutError):
            got = await asyncio.wait_for(channel.receive(), 0.5)
            assert isinstance(got, Step) and len(got.events[0].hashes) == 512 << 20
        end = ZmqEngineEnd(channel.address)
        end.send(Step(seconds=1.0))
        async with asyncio.timeout(20):
            assert await channel.receive() == Step(seconds=1.0)
        end.close()
    finally:
        if engine.returncode is None:
            engine.kill()
        channel.close()


def test_messages_of_any_size_and_an_engine_that_dies_within_one() -> None:
    asyncio.run(_talk())


def test_a_wait_of_less_than_a_millisecond() -> None:
    async def talk() -> None:
        channel = ZmqChannel()
        end = ZmqEngineEnd(channel.address)
        try:
            assert end.receive(0.0002) == []
            got: list[ToEngine] = []
            while not got:
                channel.send(Stop())  # it is not received before the engine's end is connected
                await asyncio.sleep(0)
                got = end.receive(0.0002)
            assert got[0] == Stop()
        finally:
            end.close()
            channel.close()

    asyncio.run(asyncio.wait_for(talk(), 20))


def test_no_other_user_of_the_node_reaches_the_sockets() -> None:
    channel = ZmqChannel()
    try:
        assert Path(channel.address).stat().st_mode & 0o077 == 0
        assert {path.name for path in Path(channel.address).iterdir()} == {"to", "from"}
    finally:
        channel.close()
