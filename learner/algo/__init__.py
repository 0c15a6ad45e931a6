"""The algorithm: advantages, surrogate objectives and losses, as pure functions."""
