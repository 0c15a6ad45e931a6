"""A run from a script or a notebook: the same engine in a process of its own, the same errors as exceptions."""
