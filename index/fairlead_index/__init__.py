"""The Redis index of which worker holds which prefix block, with its writer, its readers and the score. Imports `fairlead_common` alone."""
