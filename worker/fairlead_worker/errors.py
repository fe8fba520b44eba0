"""Errors while a model or an adapter is loaded."""


class ModelLoadError(Exception):
    """A model cannot be served. The message names the URI, the cause and what to do."""

    def __init__(self, uri: str, cause: str) -> None:
        super().__init__(f"cannot load model {uri}: {cause}")
        self.uri = uri
        self.cause = cause


class AdapterError(Exception):
    """A LoRA adapter cannot be served. The message names it, its URI, the cause and what to do."""

    def __init__(self, name: str, uri: str, cause: str) -> None:
        self.cause = cause.encode(errors="replace").decode()  # a file's text may contain a lone surrogate, which JSON and UTF-8 cannot
        super().__init__(f"cannot load LoRA adapter {name} from {uri}: {self.cause}")
