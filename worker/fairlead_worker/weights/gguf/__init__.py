"""GGUF files: read, and described by the ordinary files of a model, so that only the loader of weights knows them."""
