"""Reward functions: text in, number out. No torch, no ray.

Read in this order: base (what a reward is), config (what the user writes), loader (spec -> function),
pool (how functions are run safely), check (the trial before any model loads). Nothing is imported here,
so that `rewards.config` stays as light as a config file must be.
"""
