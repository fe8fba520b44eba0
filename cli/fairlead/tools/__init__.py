"""Small commands that look and change nothing: `status`, `doctor`."""
