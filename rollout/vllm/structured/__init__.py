"""Completions in a form that the user gives (rollout.structured_outputs): what may be sampled next, before it is."""
