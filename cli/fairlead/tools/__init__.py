"""Small commands that change nothing: `status`, `doctor`, `verify`."""
