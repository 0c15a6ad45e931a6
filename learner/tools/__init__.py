"""Commands beside the run itself."""
