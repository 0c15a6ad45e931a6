"""The policy: base model, adapters, packed attention, logprobs, and what is exported."""
