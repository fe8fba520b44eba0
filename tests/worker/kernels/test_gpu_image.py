"""images/Containerfile.worker-gpu compiles kernels in a stage that has only some of the worker's modules."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONTAINERFILE = ROOT / "images" / "Containerfile.worker-gpu"
BUILD = "/build"


def copied_modules() -> list[tuple[str, str]]:
    """Return source and target folder of each file that the stage copies below BUILD."""
    lines = CONTAINERFILE.read_text().replace("\\\n", " ").splitlines()
    copies = [line.split()[1:] for line in lines if line.startswith("COPY ") and f" {BUILD}/" in line]
    return [(source, target) for *sources, target in copies for source in sources]


def test_the_kernel_stage_has_every_module_that_its_program_imports(tmp_path: Path) -> None:
    for source, target in copied_modules():
        folder = tmp_path / target.removeprefix(f"{BUILD}/")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, folder)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fairlead_worker.kernels.prebuild as it; print(it.__file__)"
    # -P and an empty PYTHONPATH: the checkout itself must not provide what the stage lacks.
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, env={"PYTHONPATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
