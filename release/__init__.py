"""`make release`: the files of a release, twice from one commit, and a rehearsal of their push to a registry."""
