"""Compile every CUDA kernel that the worker uses, without a GPU: registers, spills, shared memory.

nvcc and FlashInfer come from wheels (requirements/gpu-kernels.txt), in their own environment in the user's cache. A source that was
compiled before is not compiled again. Exit status 1: a kernel does not compile, or spills more than bench/gpu/spills.json allows.
"""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

from tests.own_environment import OwnEnvironment

from bench.common.report import ROOT, make_parser, write_report

ENVIRONMENT = OwnEnvironment("gpu-kernels", ROOT / "requirements" / "gpu-kernels.txt", "--no-deps")
ARCHES = "8.0 9.0a"
"""A100 and H100, as FlashInfer names them."""
CI = ("page", "norm", "rope", "silu_and_mul", "prefill bf16 128", "decode bf16 128")
"""The modules of a Llama in bfloat16: one of each kind."""
NOT_RUN = re.compile(r"ragged|mask_[023]")
"""Sources of the prefill modules for other KV layouts and masks. The image compiles them too, as they are part of the module."""
NO_KERNELS = re.compile(r"(_binding|/batch_decode|/batch_prefill|/batch_prefill_sm90|/batch_mla_plan)\.cu$")
"""Bindings and planners: host code, which the image's test compiles."""
LIMITS = Path(__file__).parent / "spills.json"
COMPILER_SECONDS = 900
KERNEL = re.compile(
    r"Compiling entry function '(\w+)' for '(\w+)'\n.*\n *(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*Used (\d+) registers(.*)"
)
ATTENTION = re.compile(
    r"batch_(prefill|decode)\w*dtype_q_(\w+?)_dtype_kv_(\w+?)_\w*_qk_(\d+)_\w*swa_(\w+)_use_logits_cap_(True|False)(\w*_sm90)?"
)


@dataclass(frozen=True, slots=True)
class Source:
    """One file for nvcc. `command` writes an object to `target`."""

    module: str
    path: Path
    command: tuple[str, ...]
    target: str

    def key(self) -> str:
        """Return a digest of all that decides the result, beside the pins: flags, the source, and what was generated for its module."""
        flags = [
            part.replace(str(ENVIRONMENT.folder), "").replace(str(torch_headers()), "") for part in self.command if part != self.target
        ]
        generated = sorted(self.path.parent.glob("*.inc")) if self.module in self.path.parent.name else []
        parts = [*(part.encode() for part in flags), *(path.read_bytes() for path in (self.path, *generated))]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Kernel:
    """What ptxas says of one kernel. `spilled`: bytes a thread writes to local memory for lack of registers."""

    name: str
    arch: str
    registers: int
    spilled: int
    shared: int
    """Static shared memory, in bytes. FlashInfer's attention asks for its own at the launch."""


def main() -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument(
        "--modules", nargs="+", metavar="PATTERN", default=["*"], help="names as `prebuild --list` or this command prints them (all)"
    )
    parser.add_argument("--ci", action="store_true", help="only one module of each kind, which take three minutes of a core")
    parser.add_argument("--install", action="store_true", help="only install nvcc and FlashInfer")
    parser.add_argument("--accept", action="store_true", help="write the spills of these modules to spills.json")
    options = parser.parse_args()
    if problem := ENVIRONMENT.install():
        print(f"gpu/kernels: nvcc and FlashInfer cannot be installed: {problem}", file=sys.stderr)
        return 1
    if options.install:
        return 0
    found = sources(CI if options.ci else options.modules)
    if not found:
        print(f"gpu/kernels: no module is called {' or '.join(options.modules)}; see `prebuild --list`", file=sys.stderr)
        return 2
    try:
        rows = summarize(compile_all(found))
    except CompilerError as error:
        print(error, file=sys.stderr)
        return 1
    print(format_table(rows))
    write_report(__name__, options, rows)
    limits = json.loads(LIMITS.read_text())
    if options.accept:
        accepted = limits | {name(row): {"kernels": row["spilling"], "bytes": row["spilled"]} for row in rows if row["spilling"]}
        LIMITS.write_text(json.dumps(dict(sorted(accepted.items())), indent=1) + "\n")
        return 0
    exceeded = list(above(rows, limits))
    print("\n".join(exceeded), file=sys.stderr)
    return 1 if exceeded else 0


def sources(patterns: Sequence[str]) -> list[Source]:
    """Return the sources of the modules that the GPU image compiles, as far as they have kernels that the worker launches."""
    for variable, value in environment().items():
        os.environ[variable] = value
    sys.path.append(str(site()))
    import torch

    from fairlead_worker.kernels import prebuild
    from fairlead_worker.kernels.flashinfer_library import HEAD_DIMS

    specs = prebuild.modules(list(HEAD_DIMS), [torch.bfloat16, torch.float16], hopper=True)
    found = []
    for module, spec in specs.items():
        if not any(fnmatch(name, pattern) for pattern in patterns for name in (module, label(module))):
            continue
        for entry in spec.get_compile_commands():  # type: ignore[attr-defined]  # FlashInfer has no types here
            path = Path(entry["file"])
            if path.suffix == ".cu" and not NOT_RUN.search(path.name) and not NO_KERNELS.search(str(path)):
                command = shlex.split(entry["command"])
                found.append(Source(module, path, tuple(command), command[-1]))
    return found


def site() -> Path:
    """Return the folder of the environment's packages."""
    return next((ENVIRONMENT.folder / "lib").glob("python*/site-packages"))


def environment() -> dict[str, str]:
    """Return FlashInfer's variables: where nvcc is, what to compile for, and a folder for generated sources.

    Some headers of FlashInfer include cuBLAS's, which torch's packages have.
    """
    return {
        "CUDA_HOME": str(site() / "nvidia" / "cu13"),
        "FLASHINFER_CUDA_ARCH_LIST": ARCHES,
        "FLASHINFER_WORKSPACE_BASE": str(ENVIRONMENT.folder),
        "FLASHINFER_EXTRA_CUDAFLAGS": f"-isystem {torch_headers()}",
    }


def torch_headers() -> Path:
    """Return the folder of CUDA's headers beside torch."""
    import torch

    return Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "include"


class CompilerError(RuntimeError):
    """nvcc failed. The message ends with its output."""


def compile_all(found: Sequence[Source]) -> dict[Source, list[Kernel]]:
    """Compile on all cores and print a line for each source."""
    done: dict[Source, list[Kernel]] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = {pool.submit(compile_source, source): source for source in found}
        try:
            for future in as_completed(running):
                source, (kernels, seconds) = running[future], future.result()
                done[source] = kernels
                note = f"{seconds:.0f} s" if seconds else "cached"
                print(f"[{len(done)}/{len(found)}] {label(source.module)}: {source.path.name}, {len(kernels)} kernels, {note}", flush=True)
        except CompilerError:
            pool.shutdown(cancel_futures=True)
            raise
    return {source: done[source] for source in found}


def compile_source(source: Source) -> tuple[list[Kernel], float]:
    """Return the kernels of `source`, and the seconds that nvcc took; 0 from the cache."""
    cached = ENVIRONMENT.folder / "kernels" / f"{source.key()}.json"
    if cached.exists():
        return [Kernel(**entry) for entry in json.loads(cached.read_text())], 0.0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [part if part != source.target else f"{folder}/object.o" for part in source.command]
        done = subprocess.run([*command, "--resource-usage"], cwd=folder, capture_output=True, text=True, timeout=COMPILER_SECONDS)
    if done.returncode:
        raise CompilerError(f"{source.module}: {source.path.name} does not compile:\n{done.stderr[-3000:]}")
    kernels = parse(done.stdout + done.stderr)
    if not kernels:
        raise CompilerError(f"{source.module}: {source.path.name} has no kernel; NO_KERNELS names such files")
    cached.parent.mkdir(exist_ok=True)
    partial = cached.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps([asdict(kernel) for kernel in kernels]))
    partial.replace(cached)
    return kernels, time.monotonic() - began


def parse(output: str) -> list[Kernel]:
    """Return the kernels of which `ptxas -v` reports."""
    found = KERNEL.findall(output)
    demangled = subprocess.run(["c++filt", "-p"], input="\n".join(entry[0] for entry in found), capture_output=True, text=True, check=True)
    return [
        Kernel(readable, arch, int(registers), int(stores), int(shared[1]) if (shared := re.search(r"(\d+) bytes smem", rest)) else 0)
        for readable, (_, arch, _, stores, _, registers, rest) in zip(demangled.stdout.splitlines(), found, strict=True)
    ]


def summarize(compiled: Mapping[Source, Sequence[Kernel]]) -> list[dict[str, str | int]]:
    """Return a row for each module and architecture."""
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for source, kernels in compiled.items():
        for kernel in kernels:
            groups.setdefault((label(source.module), kernel.arch), []).append(kernel)
    return [
        {
            "module": module,
            "arch": arch,
            "kernels": len(kernels),
            "registers": max(kernel.registers for kernel in kernels),
            "shared": max(kernel.shared for kernel in kernels),
            "spilling": sum(kernel.spilled > 0 for kernel in kernels),
            "spilled": max(kernel.spilled for kernel in kernels),
            "worst": max(kernels, key=lambda kernel: kernel.spilled).name if any(kernel.spilled for kernel in kernels) else "",
        }
        for (module, arch), kernels in groups.items()
    ]


def above(rows: Sequence[Mapping[str, str | int]], limits: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield a line for each row with more kernels that spill, or more bytes in one of them, than `limits` allows; no entry: none."""
    for row in rows:
        allowed = limits.get(name(row), {"kernels": 0, "bytes": 0})
        if int(row["spilling"]) > allowed["kernels"] or int(row["spilled"]) > allowed["bytes"]:
            yield (
                f"{name(row)}: {row['spilling']} kernels spill, at most {row['spilled']} bytes a thread ({row['worst']}); allowed are "
                f"{allowed['kernels']} kernels and {allowed['bytes']} bytes. If that is acceptable: --accept"
            )


def name(row: Mapping[str, str | int]) -> str:
    """Return a row's key in spills.json."""
    return f"{row['module']} {row['arch']}"


def label(module: str) -> str:
    """Return a short name of a module: `prefill bf16 128 e4m3 KV window cap fa3`."""
    match = ATTENTION.search(module)
    if match is None:
        return module
    kind, dtype, stored, dim, window, cap, fa3 = match.groups()
    notes = {f"{stored} KV": stored != dtype, "window": window == "True", "cap": cap == "True", "fa3": fa3 is not None}
    return " ".join([kind, dtype, dim, *(note for note, is_so in notes.items() if is_so)])


def format_table(rows: Sequence[Mapping[str, str | int]]) -> str:
    lines = [f"{'module':30} {'arch':7} {'kernels':>7} {'registers':>9} {'shared':>7} {'spilling':>8} {'bytes':>6}"]
    for row in rows:
        counts = f"{row['kernels']:7} {row['registers']:9} {row['shared']:7} {row['spilling']:8} {row['spilled']:6}"
        lines.append(f"{row['module']:30} {row['arch']:7} {counts}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
