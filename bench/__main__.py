"""Run one benchmark, or list them all.

python -m bench list
python -m bench NAME [options]
python -m bench NAME --help
"""

import importlib
import sys

from bench import catalog
from fairlead_worker.native import build


def main() -> int:
    """Run the benchmark that the command line names. Return its exit status."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(__doc__.strip())
        return 0 if arguments else 2
    name, *options = arguments
    if name == "list":
        print(catalog.format_list())
        return 0
    name = catalog.full_name(name)
    if name not in catalog.benchmarks():
        near = catalog.find_similar(name)
        hint = f" Did you mean {near}?" if near else ""
        print(f"bench: no benchmark is called {name!r}.{hint} `python -m bench list` shows all names.", file=sys.stderr)
        return 2
    if build.LEVELS and not build.current():
        print(
            "bench: without native kernels a CPU worker takes twice as long: run `python -m fairlead_worker.native.build`", file=sys.stderr
        )
    sys.argv = [name, *options]
    return importlib.import_module(f"bench.{name.replace('/', '.')}").main() or 0


if __name__ == "__main__":
    sys.exit(main())
