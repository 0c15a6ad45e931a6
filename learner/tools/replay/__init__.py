"""gleaner replay: a run's recorded steps, taken again without generating."""
