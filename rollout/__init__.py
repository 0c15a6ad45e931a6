"""The rollout side of a run: generates groups of completions for problems, and has reward functions score them."""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from cluster.own_path import of_users

        return of_users(__name__, name)
