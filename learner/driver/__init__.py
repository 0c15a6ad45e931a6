"""The driver's process: checks, wiring, the loop and what a run leaves behind. Imports no torch."""
