"""A long run with one fault a minute: `make soak`."""
