"""gleaner rewards try on rows of the data: what reward functions say before any run exists."""
