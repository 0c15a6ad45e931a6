"""One base model in two processes (memory.base: shared): the generator owns its bytes, the learner maps them."""
