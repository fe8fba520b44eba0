"""The channel between the API process and the engine, over real sockets."""

import subprocess
import sys

SENDERS, MESSAGES = 8, 10_000

# In a process of its own: what goes wrong here is ZeroMQ's abort.
PROGRAM = f"""
import asyncio, sys, threading
from fairlead_worker.messages import Loading
from fairlead_worker.transport import ZmqChannel, ZmqEngineEnd

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
