"""The steps of the GPU image run, from its packages and copied files to a compiled kernel that FlashInfer finds."""

import shutil

import pytest

from e2e import gpu_image
from e2e.cluster import images

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not all(map(shutil.which, ("buildah", "mmdebstrap", "gcc"))), reason="no buildah, mmdebstrap or gcc on this machine"
    ),
]
SOURCE = gpu_image.CONTAINERFILE.read_text()


def test_every_step_of_the_gpu_image_runs() -> None:
    gpu_image.build(SOURCE)


@pytest.mark.parametrize(
    "step, broken, message",
    [
        (" worker/fairlead_worker/native/memory.py ", " ", "No module named 'fairlead_worker.native.memory'"),
        ("kernels.prebuild --head-dims", "kernels.prebuild --heads", "unrecognized arguments"),
    ],
    ids=["a file that is not copied", "a flag that does not exist"],
)
def test_a_step_that_would_fail_in_the_real_build_fails(step: str, broken: str, message: str) -> None:
    assert step in SOURCE
    with pytest.raises(images.ImageFailed, match=message):
        gpu_image.build(SOURCE.replace(step, broken))
