"""Reward functions: they get the text of completions and return numbers. The package imports neither torch nor ray.

Read it in this order: base (what a reward function is), config (what the user writes), loader (from `use` to the
function), pool (how functions are run safely), check (the trial before a run loads a model). Nothing is imported here,
so that `rewards.config` can be imported quickly.
"""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from cluster.own_path import of_users

        return of_users(__name__, name)
