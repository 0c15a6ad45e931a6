"""The learner as several processes, its ranks, which share the work of each step and stay equal to the bit."""
