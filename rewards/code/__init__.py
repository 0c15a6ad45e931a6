"""Code that a policy wrote: run in processes of its own, which confine themselves."""
