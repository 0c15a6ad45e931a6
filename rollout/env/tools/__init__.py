"""Tools: what a function is to a model, how its calls are read, and those that come with gleaner."""
