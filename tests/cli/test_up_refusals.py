"""What `fairlead up` refuses before anything runs: one line that names what is wrong, and no file left behind."""

from pathlib import Path

import pytest

from fairlead.errors import UserError
from fairlead.local.cluster import LocalCluster
from fairlead.local.manifest import read_manifest
from fairlead.local.up import check_ports_free


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe\x00", "not YAML"),
        (b"kind: InferenceService\napiVersion: fairlead.dev/v1alpha1\nmetadata: qwen\n", "metadata must be a mapping"),
        (b"kind: InferenceService\napiVersion: fairlead.dev/v1alpha1\nmetadata: {name: ../x}\n", "metadata.name must be"),
    ],
)
def test_a_file_that_is_no_manifest_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "service.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError) as refused:
        read_manifest(file)
    assert words in str(refused.value) and str(file) in str(refused.value)


def test_ports_beyond_the_last_are_refused() -> None:
    with pytest.raises(UserError, match="--port 65535: 2 services need the ports up to 65536; choose at most 65534"):
        check_ports_free(65535, 2)


async def test_a_run_that_never_began_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("fairlead.local.redis.find_redis_server", lambda: None)
    cluster = LocalCluster("qwen", port=1, host_env={}, cpus=1)
    with pytest.raises(UserError, match="redis-server"):
        async with cluster:
            pass
    assert not cluster.directory.exists()
