"""Rows of problems: where they lie once they are read, and the readers of JSON and CSV."""
