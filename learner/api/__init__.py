"""The Python interface (`train`, `evaluate`, `plan`). A run is started from a script or a notebook in a process of its
own, and the errors of the command line are raised as exceptions."""
