"""The learner's process: one policy, its optimizer and the memory that they may take."""
