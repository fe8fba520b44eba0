"""Models that are composed of our own layers, one file for each family."""
