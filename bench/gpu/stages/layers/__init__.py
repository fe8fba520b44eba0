"""Stages of single kinds of layers."""
