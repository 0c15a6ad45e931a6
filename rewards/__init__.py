"""Reward functions: text in, number out. No torch, no ray.

Read in this order: base (what a reward is), config (what the user writes), loader (spec -> function),
pool (how functions are run safely), check (the trial before any model loads). Nothing is imported here,
so that `rewards.config` stays as light as a config file must be.
"""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from cluster.own_path import of_users

        return of_users(__name__, name)
