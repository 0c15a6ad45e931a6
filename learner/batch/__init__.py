"""Groups as the learner reads them: rows, and the micro-batches that are made of the rows."""
