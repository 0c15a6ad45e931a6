"""Pipes between processes, the processes themselves, their placement, telemetry and memory planning. Nothing here
depends on the training algorithm, and nothing of the other packages is imported."""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from cluster.own_path import of_users

        return of_users(__name__, name)
