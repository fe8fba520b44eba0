"""The stages of `python -m bench gpu/check`: each yields its findings as rows."""
