"""Batch API: the process `fairlead-batch`, which keeps files and batches on a volume or in S3 and sends their lines to the router."""
