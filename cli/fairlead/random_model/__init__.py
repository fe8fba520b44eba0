"""Random-weight models for tests, demos and benchmarks: made locally in seconds, nothing downloaded.

`recipe` says what to make, `architectures` turns it into a transformers config, `tokenizer` trains on local text,
`build` writes the directory.
"""

from fairlead.random_model.build import make_model
from fairlead.random_model.recipe import ARCHITECTURES, Recipe

__all__ = ["ARCHITECTURES", "Recipe", "make_model"]
