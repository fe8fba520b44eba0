"""Memory bandwidth and FLOP/s of two cores of this machine: the limits for `engine/weight_bandwidth`.

It needs a C compiler and a CPU with AVX512-BF16. On virtual machines the hypervisor moves cores, which changes what two threads read.
The time of a cache line from one core to the other tells whether they share a chiplet.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.common.report import make_parser, write_report

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-Wall")


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        print("this CPU has no AVX512-BF16: there is nothing to compare the worker's kernels with")
        return
    if (compiler := next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)) is None:
        sys.exit("no C compiler (cc, gcc or clang): install gcc")
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/machine"
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", program], check=True)
        print(f"{'read, GB/s: 1 thread':>21}{'2':>7}{'a cache line, ns':>19}{'GFLOP/s: 1 thread':>20}{'2':>7}", flush=True)
        with subprocess.Popen([program, str(options.rounds)], stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            for line in running.stdout:
                found = json.loads(line)
                rounds.append(found)
                print(
                    f"{found['read_1'] / 1e9:21.1f}{found['read_2'] / 1e9:7.1f}{found['line_s'] * 1e9:19.0f}"
                    f"{found['flops_1'] / 1e9:20.0f}{found['flops_2'] / 1e9:7.0f}",
                    flush=True,
                )
        if running.returncode:
            sys.exit(f"the program ended with {running.returncode}")
    write_report(__name__, options, rounds)
