"""`fairlead models`: the list that the exactness tests run."""

from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from fairlead.console import make_console
from fairlead.options import Output, print_data, takes
from fairlead.program import describe, new_app
from fairlead_worker.model.catalog import COMPARED, PATHS, list_families, list_refused

app = new_app()


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """The options of `fairlead models`."""

    output: Output = "table"


@app.command(
    help=describe(
        "List the families of models that tests compare with transformers, token for token, and those that are refused. "
        "`fairlead check MODEL` checks one model.",
        "fairlead models",
        "fairlead models -o json",
    )
)
@takes(ModelsOptions)
def run(options: ModelsOptions) -> int:
    served, refused = list_families(), list_refused()
    if options.output != "table":
        print_data({"served": served, "refused": refused}, options.output)
        return 0
    console = make_console()
    for title, rows in (("served", served), ("refused", refused)):
        console.print(f"[bold]{len(rows)} {title}[/]")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        for name in rows[0]:
            table.add_column(name, overflow="fold", no_wrap=name == "family")
        for row in rows:
            table.add_row(*map(escape, row.values()))
        console.print(table)
        console.print()
    for name, text in (*PATHS.items(), *COMPARED.items()):
        console.print(f"{name}: {text}", style="dim", markup=False)
    return 0
