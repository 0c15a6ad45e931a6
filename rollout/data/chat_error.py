"""What the parts of Chat raise."""


class ChatError(ValueError):
    """A tokenizer or a conversation that cannot be used; the message says which, why, and what to do."""
