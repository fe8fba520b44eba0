"""What can go wrong with a model before it serves."""


class ModelLoadError(Exception):
    """A model cannot be served. The message names the URI, the cause and what to do."""

    def __init__(self, uri: str, cause: str) -> None:
        super().__init__(f"cannot load model {uri}: {cause}")
        self.uri = uri
        self.cause = cause


class AdapterError(Exception):
    """A LoRA adapter cannot be served. The message names it, where it comes from, the cause and what to do."""

    def __init__(self, name: str, uri: str, cause: str) -> None:
        self.cause = cause.encode(errors="replace").decode()  # a file's words may hold half a surrogate pair, which no message can
        super().__init__(f"cannot load LoRA adapter {name} from {uri}: {self.cause}")
