"""The exceptions of the release tool."""


class ReleaseFailed(RuntimeError):
    """A file of the release cannot be made. The message says which, why, and what to do next."""


class Missing(RuntimeError):
    """A program that one step needs is not on this machine. The other steps do not need it."""
