"""Problems: where they come from, how they become prompts, and which are done."""
