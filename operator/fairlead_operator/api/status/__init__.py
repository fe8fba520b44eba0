"""The types of `status`: written by the operator, read by users and the command line."""
