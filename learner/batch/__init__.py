"""Groups as the learner reads them: rows, and the micro-batches that they make."""
