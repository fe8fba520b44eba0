"""Uploads pass through the router as they arrive: in bounded memory, with backpressure, and without traces of broken ones."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.router.batch.deployment import ANNA, Deployment, line
from tests.system.processes import until

MEGABYTES = 96


def peak_megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def bearer() -> dict[str, str]:
    return {"authorization": f"Bearer {ANNA}"}


def body(boundary: str, megabytes: int) -> Iterator[bytes]:
    """A form without an announced length."""
    yield f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'.encode()
    yield f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'.encode()
    padded = json.dumps(line("a", prompt="x" * (1 << 18))).encode() + b"\n"
    for _ in range(megabytes * 4):
        yield padded
    yield f"\r\n--{boundary}--\r\n".encode()


def test_a_large_upload_and_download_need_little_memory(deployment: Deployment) -> None:
    headers = bearer() | {"content-type": "multipart/form-data; boundary=b"}
    httpx.get(f"{deployment.url}/v1/files", headers=bearer())
    before = {process.name: peak_megabytes(process.pid) for process in (deployment.router, deployment.batch)}
    sent = httpx.post(f"{deployment.url}/v1/files", headers=headers, content=body("b", MEGABYTES), timeout=120)
    assert sent.status_code == 200, sent.text
    assert sent.json()["bytes"] > MEGABYTES << 20
    received = 0
    with httpx.stream("GET", f"{deployment.url}/v1/files/{sent.json()['id']}/content", headers=bearer(), timeout=120) as answer:
        for piece in answer.iter_raw():
            received += len(piece)
    assert received == sent.json()["bytes"]
    for process in (deployment.router, deployment.batch):
        grown = peak_megabytes(process.pid) - before[process.name]
        assert grown < MEGABYTES / 3, f"{process.name} grew by {grown:.0f} MB"


def test_a_head_of_a_content_has_its_length_and_no_body(deployment: Deployment) -> None:
    files = {"file": ("in.jsonl", json.dumps(line("a")).encode()), "purpose": (None, "batch")}
    with httpx.Client(base_url=deployment.url, headers=bearer()) as client:
        sent = client.post("/v1/files", files=files).json()
        for _ in range(3):  # on the same connections to router and batch server
            head, got = client.head(f"/v1/files/{sent['id']}/content"), client.get(f"/v1/files/{sent['id']}/content")
            assert head.headers["content-length"] == str(sent["bytes"]) and not head.content
            assert got.status_code == 200 and json.loads(got.content) == line("a")


def test_a_download_during_which_the_batch_server_is_killed_is_truncated_and_not_completed(deployment: Deployment) -> None:
    headers = bearer() | {"content-type": "multipart/form-data; boundary=b"}
    sent = httpx.post(f"{deployment.url}/v1/files", headers=headers, content=body("b", 48), timeout=120).json()
    with httpx.stream("GET", f"{deployment.url}/v1/files/{sent['id']}/content", headers=bearer(), timeout=120) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        deployment.kill_and_restart()
        with pytest.raises(httpx.RemoteProtocolError):
            for _ in pieces:
                pass
    deployment.wait_for_batch_server()
    assert httpx.get(f"{deployment.url}/v1/files/{sent['id']}", headers=bearer()).status_code == 200


def test_an_upload_that_breaks_off_leaves_nothing(deployment: Deployment) -> None:
    with socket.create_connection(("127.0.0.1", deployment.router_port)) as client:
        head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ANNA}\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        client.sendall(f"{head}content-length: 9000000\r\n\r\n".encode())
        client.sendall(b"".join(body("b", 1))[:900_000])
        folder = Path(deployment.storage.removeprefix("file://")) / "files"
        until(lambda: any(path.suffix == ".part" for path in folder.iterdir()), "the upload has begun")
    until(lambda: not any(path.suffix == ".part" for path in folder.iterdir()), "the broken upload is removed", 30)


def test_an_unauthenticated_upload_is_refused_before_its_body(deployment: Deployment) -> None:
    answer = httpx.post(f"{deployment.url}/v1/files", content=body("b", 4), headers={"content-type": "multipart/form-data; boundary=b"})
    assert answer.status_code == 401
