"""Builds the status and conditions of a service from what is observed. Pure."""
