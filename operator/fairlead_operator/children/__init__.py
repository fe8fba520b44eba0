"""The objects of one service, as dicts ready for server-side apply. Pure: no I/O, no clock, no randomness."""

from typing import Any

Object = dict[str, Any]
