"""The memory model of learner and generator, in bytes, and the planner that fits a run onto a GPU."""
