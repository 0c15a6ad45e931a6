"""A value on its way to several processes."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Shared(Generic[T]):
    """An argument for calls of several actors, whose methods get the value itself.

    Between processes it is serialised once, by the first call; `handle` is that copy, in the object store.
    """

    value: T
    handle: Any = None

    def forget(self) -> None:
        """Frees the copy, once the calls that are under way have it; a later call makes another."""
        self.handle = None
