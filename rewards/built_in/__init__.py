"""The reward functions that come with gleaner, one in each file; rewards.loader names them."""
