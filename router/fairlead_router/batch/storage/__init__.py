"""Durable storage of files, records and result logs: a folder or a bucket."""
