"""Which worker: the policies, and behind `PrefixAware` the index, its copy, and what is done without either."""
