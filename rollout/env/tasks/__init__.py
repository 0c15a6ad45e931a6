"""Environments that come with gleaner."""
