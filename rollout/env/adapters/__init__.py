"""Environments of other libraries, unchanged."""
