"""The driver's process: it checks a run's inputs, starts and connects the other processes, runs the training loop, and
writes the run folder. It imports no torch."""
