"""An environment in a process of its own: how it is forked, asked, and what it may answer."""
