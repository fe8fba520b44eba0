"""A schedule of steps, as a worker traces it with `--trace-schedule`: parsed, described and drawn. Pure."""
