"""Producers: problems in, groups of scored completions out, as Arrow tables."""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from cluster.own_path import of_users

        return of_users(__name__, name)
