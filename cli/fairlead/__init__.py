"""The command line: `fairlead up`, `demo`, `bench serve`, `make-model`, `status` and more.

It may import every other package.
"""
