"""gleaner export: what a run has learned as a folder for others, verified, with a model card."""
