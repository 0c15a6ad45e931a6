"""The algorithm: advantages, ratios and losses, as pure functions."""
