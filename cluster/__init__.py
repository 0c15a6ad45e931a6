"""Pipes, processes, placement, telemetry and memory planning. Knows no algorithm."""
