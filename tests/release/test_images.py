"""Images are built from pinned tools, and from nothing that was compiled on the host."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from release.archives import IMAGES, copied

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize("image", IMAGES)
def test_every_package_in_an_image_and_its_build_backend_are_pinned_with_hashes(image: str) -> None:
    text = (CHECKOUT / "images" / f"Containerfile.{image}").read_text()
    installs = re.findall(r"pip install (.*)", text)
    allowed = re.compile(r".*--require-hashes -r \S+$|--no-deps --no-index /opt/wheel/\*\.whl$")
    assert len(installs) == 3 and all(map(allowed.match, installs)), installs
    assert "requirements/build.txt" in copied(text), "the build backend"


def test_one_wheel_of_the_gpu_image_has_cuda_bindings() -> None:
    """cuda-python 12.6 has files of cuda/bindings itself. From 13 on it depends on cuda-bindings of the same minor release."""
    text = (CHECKOUT / "requirements" / "worker-gpu.txt").read_text()
    pins = {name: version.split(".") for name, version in re.findall(r"^(cuda-[a-z]+)==(\S+)", text, re.MULTILINE)}
    assert int(pins["cuda-python"][0]) >= 13
    assert pins["cuda-python"][:2] == pins["cuda-bindings"][:2]


@pytest.mark.skipif(shutil.which("buildah") is None, reason="no buildah on this machine")
def test_a_library_that_was_compiled_on_the_host_is_not_in_an_image(tmp_path: Path) -> None:
    context = tmp_path / "context"
    native = context / "worker" / "fairlead_worker" / "native"
    (native / "__pycache__").mkdir(parents=True)
    for name in ("build.py", "libfairlead.so", "libfairlead.key", "libfairlead.123", "__pycache__/build.pyc"):
        (native / name).write_text("x")
    shutil.copy(CHECKOUT / ".dockerignore", context)
    (context / "Containerfile").write_text("FROM scratch\nCOPY worker /worker\n")
    buildah = ["buildah", "--storage-driver=vfs", f"--root={tmp_path / 'storage'}", f"--runroot={tmp_path / 'run'}"]
    output = f"type=local,dest={tmp_path / 'image'}"
    subprocess.run([*buildah, "build", "--quiet", "--isolation=chroot", "--output", output, str(context)], check=True, capture_output=True)
    assert [path.name for path in (tmp_path / "image").rglob("*") if path.is_file()] == ["build.py"]


@pytest.mark.parametrize("image", IMAGES)
def test_everything_that_an_image_copies_is_left_in_its_context(image: str) -> None:
    ignored = (CHECKOUT / ".dockerignore").read_text().split()
    assert not {source.split("/")[0] for source in copied((CHECKOUT / "images" / f"Containerfile.{image}").read_text())} & set(ignored)


def test_the_gpu_image_copies_all_that_its_compiler_imports(tmp_path: Path) -> None:
    """`e2e/test_gpu_image.py` runs every step, which takes minutes."""
    text = (CHECKOUT / "images" / "Containerfile.worker-gpu").read_text().replace("\\\n", " ")
    for copy in re.findall(r"^COPY (.* /build/\S+)$", text, re.MULTILINE):
        *files, target = copy.split()
        folder = tmp_path / target.removeprefix("/build/")
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(CHECKOUT / file, folder)
    done = subprocess.run(
        [sys.executable, "-c", "import fairlead_worker.kernels.prebuild as found; print(found.__file__)"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.startswith(str(tmp_path)), done.stderr
