"""The names of the benchmarks. A benchmark is a module in a folder of `bench/` with a function `main()`; its name is FOLDER/MODULE.

The name of a folder with a single benchmark is also that benchmark's name.

Nothing is imported here, so that the list needs neither torch nor the packages that a benchmark measures.
"""

import ast
import difflib
import functools
from pathlib import Path

HERE = Path(__file__).parent


@functools.cache
def benchmarks() -> dict[str, str]:
    """Return the first sentence of each benchmark's docstring, by name."""
    found = {}
    for path in sorted(HERE.glob("*/*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[f"{path.parent.name}/{path.stem}"] = _summary(tree)
    return found


def format_list() -> str:
    """Return a table of names and summaries, grouped by folder."""
    width = max(map(len, benchmarks()))
    lines: list[str] = []
    folder = ""
    for name, summary in benchmarks().items():
        if name.partition("/")[0] != folder:
            folder = name.partition("/")[0]
            about = _summary(ast.parse((HERE / folder / "__init__.py").read_text(encoding="utf-8")))
            lines += ["", f"{folder}: {about}"] if lines else [f"{folder}: {about}"]
        lines.append(f"  {name:{width}}  {summary}")
    return "\n".join(lines)


def full_name(name: str) -> str:
    """Return FOLDER/MODULE for FOLDER if it has a single benchmark; else `name` itself."""
    inside = [known for known in benchmarks() if known.startswith(f"{name}/")]
    return inside[0] if len(inside) == 1 else name


def find_similar(name: str) -> str:
    """Return the name that is most like `name`; empty if none is."""
    by_module = [known for known in benchmarks() if known.rpartition("/")[2] == name]
    return next(iter(by_module or difflib.get_close_matches(name, benchmarks(), 1)), "")


def _summary(tree: ast.Module) -> str:
    return (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".")
