"""Which release this is."""

import importlib.metadata


def release() -> str:
    """Of the installed package; of a tree that is run as it lies there, without installing it: "0+tree"."""
    try:
        return importlib.metadata.version("fairlead")
    except importlib.metadata.PackageNotFoundError:
        return "0+tree"
