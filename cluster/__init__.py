"""The house itself: pipes, processes, placement and telemetry. Knows no algorithm."""
