"""Random-weight models for tests, demos and benchmarks: created locally in seconds, without a download.

`recipe` describes the model, `architectures` converts it to a transformers config, `tokenizer` trains on local text, and `build` writes
the directory.
"""

from fairlead.random_model.build import make_model
from fairlead.random_model.recipe import ARCHITECTURES, Recipe

__all__ = ["ARCHITECTURES", "Recipe", "make_model"]
