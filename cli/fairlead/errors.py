"""Errors that a person caused and can repair: `main` prints them as one line and exits 2, without a traceback."""


class UserError(Exception):
    """What was wrong, the value, and what to do. The message is all that the person sees."""
