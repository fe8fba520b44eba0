"""What is pushed to a registry comes back with the same digests, and what does not is refused."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from release.archives import pack
from release.errors import Missing, ReleaseFailed
from release.oci import CHART_CONFIG, CHART_LAYER, CONTEXT_CONFIG, CONTEXT_LAYER, Layout
from release.registry import find_registry, installed_registry, run_registry
from release.rehearsal import compare, pull, pull_chart, push, rehearse


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    if shutil.which("skopeo") is None:
        pytest.skip("no skopeo on this machine")
    program = installed_registry()
    if program is None:
        pytest.skip("no registry on this machine: make registry")
    with run_registry(program) as address:
        yield address


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A chart and a context."""
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: fairlead\nversion: 0.1.0\n")
    chart = pack(tmp_path / "fairlead-0.1.0.tgz", {"fairlead/Chart.yaml": tmp_path / "Chart.yaml"}, 86400)
    made = Layout(tmp_path / "oci")
    chart_config = {"apiVersion": "v2", "name": "fairlead", "version": "0.1.0"}
    made.add("charts/fairlead", (CHART_CONFIG, chart_config), [(CHART_LAYER, chart)], {"version": "0.1.0"})
    made.add("contexts/worker", (CONTEXT_CONFIG, {"image": "worker"}), [(CONTEXT_LAYER, chart)], {"version": "0.1.0"})
    made.close()
    return made


def test_artifacts_come_back_with_the_digests_that_were_pushed(registry: str, layout: Layout, tmp_path: Path) -> None:
    lines = rehearse(layout.folder, layout.manifests, "0.1.0", registry, tmp_path)
    assert [line.split()[1] for line in lines] == list(layout.manifests.values())
    assert all("3 blobs, equal" in line for line in lines)
    try:
        assert pull_chart(registry, "0.1.0", tmp_path / "fairlead-0.1.0.tgz", tmp_path / "contexts-worker").endswith("the same bytes")
    except Missing as error:
        pytest.skip(str(error))


def test_another_manifest_or_blob_is_refused(registry: str, layout: Layout, tmp_path: Path) -> None:
    push(layout.folder, "charts/fairlead", registry, "0.2.0")
    digest = layout.manifests["charts/fairlead"]
    found = pull(registry, "charts/fairlead", "0.2.0", tmp_path / "back")
    assert compare(layout.folder, tmp_path / "back", digest, found) == 3
    with pytest.raises(ReleaseFailed, match=f"the registry returned {digest}, and sha256:other was pushed"):
        compare(layout.folder, tmp_path / "back", "sha256:other", found)
    blob = next((tmp_path / "back" / "blobs" / "sha256").iterdir())
    blob.write_bytes(blob.read_bytes() + b" ")
    with pytest.raises(ReleaseFailed, match=f"blob {blob.name} is not what was pushed"):
        compare(layout.folder, tmp_path / "back", digest, found)


def test_a_push_that_fails_names_the_command(registry: str, layout: Layout) -> None:
    with pytest.raises(ReleaseFailed, match=r"skopeo .*failed: "):
        push(layout.folder, "charts/none", registry, "0.1.0")


def test_a_program_that_is_missing_is_named(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Missing, match="skopeo, which pushes and pulls OCI artifacts: install the package skopeo"):
        push(layout.folder, "charts/fairlead", "127.0.0.1:1", "0.1.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Missing, match="a registry: install the package docker-registry"):
        find_registry()
