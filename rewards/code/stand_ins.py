"""Stand-ins for objects of another process, and the rules by which their results are trusted (rewards.code.exchange).

The class of a stand-in has the operators of the object's class. If that class is derived from a plain type, such as int
or tuple, and does not define an operator itself, the operator works on the plain value in this process. Every other
operation is asked of the object's process.

The tests' side does not trust operators of the answer's own classes that involve a value of the test, since such a
class could claim to equal everything. So it refuses their `==`, their order against a value of the test, and every
number that arithmetic with such a value gave. It also takes from the plain value what Python knows of it (length,
`endswith`, `items`), unless the test has called the class itself, and so tests it (`class LRUCache(OrderedDict)` and
its `get`).
"""

from __future__ import annotations

import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from rewards.code.exchange import Values

TESTS = "tests"  # __module__ of the classes and functions that tests define
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_TOLD_OF_FUNCTIONS = ("__name__", "__qualname__", "__doc__", "__module__")
# Plain type -> how to get the plain value of an instance of a subclass without calling a method of the subclass.
_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__index__,
    float: float.__float__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    frozenset: lambda value: frozenset.__or__(value, frozenset()),
    list: lambda value: list.__getitem__(value, slice(None)),
    dict: dict.copy,
    set: lambda value: set.__or__(value, set()),
    bytearray: lambda value: bytearray.__getitem__(value, slice(None)),
}
_CHANGEABLE = (list, dict, set, bytearray)
_NUMBER = (int, float, complex)
_READ_ONLY: dict[type, Sequence[str]] = {
    list: ("copy", "count", "index"), dict: ("copy", "get", "items", "keys", "values"), set: dir(frozenset),
    bytearray: dir(bytes),
}  # fmt: skip
# Methods of the plain types that do not change the value.
_READS = {
    kind: frozenset(
        name
        for name in _READ_ONLY.get(kind, dir(kind))
        if name[0] != "_" and type(vars(kind).get(name)) is types.MethodDescriptorType
    )
    for kind in _PLAIN
}


def _special(names: str, kinds: Sequence[str] = ("",)) -> frozenset[str]:
    return frozenset(f"__{kind}{name}__" for name in names.split() for kind in kinds)


_EQUALS = _special("eq ne")
_COMPARES = _EQUALS | _special("lt le gt ge contains")
_CHANGES = _special("add sub mul truediv floordiv mod divmod pow matmul lshift rshift and or xor", ("i",)) | _special(
    "setitem delitem"
)
_COMBINES = _CHANGES - _special("setitem delitem") | _special(
    "add sub mul truediv floordiv mod divmod pow matmul lshift rshift and or xor", ("", "r")
)
_NUMBERS = _special("bool int float index complex round trunc floor ceil abs neg pos invert")
_DECIDES = _COMPARES | _COMBINES | _CHANGES  # operators with rules of their own in the answer's classes (kind_of)
SPECIAL = (
    _COMPARES
    | _CHANGES
    | _COMBINES
    | _NUMBERS
    | _special("call len iter next getitem reversed hash enter exit aenter aexit aiter anext await bytes fspath")
)


class Untrusted(BaseException):
    """It would count what an operator of the answer's own class says of a value of the test. Peer does not send it to
    the other side; a BaseException, since code under test catches exceptions."""


class NotHanded(TypeError):
    """A value that the other side cannot be given; rewards.code.tests_child says so of the test that fails."""


def may_be_shown(value: Any) -> bool:
    """Whether the answer may get a stand-in for an object of the tests: a function, an iterator, or an instance or
    class that the tests define."""
    if isinstance(value, (*_CALLABLE, types.GeneratorType)) or type(value).__module__ == TESTS:
        return True
    if isinstance(value, type):
        return value.__module__ == TESTS
    return type(value).__module__ in ("builtins", "itertools", "functools") and (
        hasattr(type(value), "__next__") or callable(value)
    )


def facts_of(value: Any) -> dict[str, Any]:
    """The facts about an object's class from which `kind_of` makes the class of its stand-ins."""
    kind = type(value)
    homes = {name: next((one for one in kind.__mro__ if name in vars(one)), object) for name in sorted(SPECIAL)}
    special = {name: home for name, home in homes.items() if home is not object and getattr(kind, name) is not None}
    base = next((one for one in kind.__mro__ if one in _PLAIN), None)
    misses = base is dict and hasattr(kind, "__missing__")  # then dict's operator calls a method of the subclass
    return {
        "name": kind.__name__,
        "special": list(special),
        "own": [n for n, home in special.items() if home is not base or (n == "__getitem__" and misses)],
        "base": None if base is None else base.__name__,
        "hashable": kind.__hash__ is not None,
        "awaited": isinstance(value, types.CoroutineType),
        "class": isinstance(value, type),
    }


class _State:
    """The state of a stand-in. number: of the object. tainted: the object is the result of an operator with a value of
    the test. made: the test has created the object by calling its class, or by an operator from such an object. plain:
    the plain value, once it is known and if it is immutable."""

    def __init__(self, peer: Values, number: int) -> None:
        self.peer, self.number, self.tainted, self.made = peer, number, False, False
        self.plain: Any = None


class Remote:
    """A stand-in for an object of the other side. Its subclasses have the operators of that object's class."""

    __slots__ = ("_of_exchange",)
    _is_plain = _is_class = False
    _reads: frozenset[str] = frozenset()

    def __init__(self, peer: Values, number: int) -> None:
        object.__setattr__(self, "_of_exchange", _State(peer, number))

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        raise NotHanded("a class of the test cannot be derived from one of the answer's")

    def __getattr__(self, name: str) -> Any:
        found = _asked(self, "get", name)
        if name in type(self)._reads and callable(found) and not state_of(self).made:  # a method, and no field
            return _method_of_plain(name, self)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        _asked(self, "set", name, value)

    def __delattr__(self, name: str) -> None:
        _asked(self, "delete", name)

    def __instancecheck__(self, value: Any) -> bool:
        return bool(_asked(self, "is instance", value))

    def __subclasscheck__(self, value: Any) -> bool:
        return bool(_asked(self, "is subclass", value))

    def __repr__(self) -> str:
        return str(_asked(self, "special", "__repr__"))

    def __str__(self) -> str:
        return str(_asked(self, "special", "__str__"))

    def __format__(self, how: str) -> str:
        return str(_asked(self, "special", "__format__", how))

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return _asked(self, "get", "__doc__")


def state_of(stand_in: Remote) -> _State:
    found: _State = object.__getattribute__(stand_in, "_of_exchange")
    return found


def _asked(stand_in: Remote, what: str, *arguments: Any, **named: Any) -> Any:
    state = state_of(stand_in)
    return state.peer.ask(what, state.number, *arguments, **named)


def kind_of(facts: Mapping[str, Any], *, guarded: bool) -> type:
    """Makes the class of stand-ins for objects of a class with these facts. guarded: whether this is the tests' side,
    whose operators follow the rules of trust."""
    base = next((kind for kind in _PLAIN if kind.__name__ == facts["base"]), None)
    changes = base in _CHANGEABLE
    members: dict[str, Any] = {"__slots__": (), "_is_plain": base is not None, "_is_class": facts["class"]}
    if base is not None:
        members["_reads"] = _READS[base] if guarded else frozenset()
        members["__class__"] = property(lambda self: base)  # isinstance looks at it
    for name in SPECIAL.intersection(facts["special"]):
        if not guarded:
            members[name] = _forwarded(name)
        elif (
            base is not None and name not in facts["own"] and hasattr(base, name) and not (changes and name in _CHANGES)
        ):
            members[name] = _of_plain(name, base)
        elif name in _COMPARES:
            members[name] = _compared(name)
        elif name in _COMBINES:
            members[name] = _combined(name, own=name in facts["own"])
        elif name in _NUMBERS:
            members[name] = _number(name)
        else:
            members[name] = _forwarded(name)
        if guarded and name in facts["own"] and name not in _DECIDES and (plain := _plain_operator(name, base)):
            members[name] = _unless_made(plain, members[name])
    if not facts["hashable"]:
        members["__hash__"] = None
    elif "__eq__" in members and "__hash__" not in members:
        members["__hash__"] = object.__hash__
    return type(str(facts["name"]), (Remote,), members)


def _forwarded(name: str) -> Callable[..., Any]:
    def forwarded(self: Remote, *arguments: Any, **named: Any) -> Any:
        if name == "__call__":
            found = state_of(self).peer.called(state_of(self).number, arguments, named)
            if type(self)._is_class and isinstance(found, Remote):
                state_of(found).made = True
            return found
        return _asked(self, "special", name, *arguments, **named)

    return forwarded


def _of_plain(name: str, base: type) -> Callable[..., Any]:
    """The operator of the plain type, on the plain values of its operands."""

    def of_plain(self: Remote, *arguments: Any) -> Any:
        return getattr(base, name)(*map(_plain_of, (self, *arguments)))

    return of_plain


def _method_of_plain(name: str, value: Remote) -> Callable[..., Any]:
    def method(*arguments: Any, **named: Any) -> Any:
        return getattr(value.__class__, name)(*map(_plain_of, (value, *arguments)), **named)

    return method


def _plain_operator(name: str, base: type | None) -> Callable[..., Any] | None:
    """The operator of a plain type under that name; None if it has none."""
    if base is None or (name != "__bool__" and getattr(base, name, None) is None):
        return None
    return _of_plain(name, base) if hasattr(base, name) else lambda self: bool(_plain_of(self))


def _unless_made(plain: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *arguments: (own if state_of(self).made else plain)(self, *arguments)


def _plain_of(value: Any) -> Any:
    """The plain value of a stand-in; any other value as it is. An immutable plain value is asked for only once, so that
    the answer cannot give another value for each comparison."""
    if not isinstance(value, Remote) or not type(value)._is_plain:
        return value
    state = state_of(value)
    if state.tainted and (not state.made or issubclass(value.__class__, _NUMBER)):
        raise _distrusted(value, "arithmetic")
    found = _asked(value, "plain") if state.plain is None else state.plain
    if not isinstance(found, _CHANGEABLE):
        state.plain = found
    return found


def shown_of(value: Any, what: str, given: tuple[Any, ...], named: dict[str, Any], *, guarded: bool = False) -> Any:
    """Answers a question of the other side about an object of this side. guarded: whether this is the tests' side,
    which answers only what an answer needs. Raises what the object raises, NotHanded, KeyError."""
    if guarded:
        _check_may_be_told(value, what, given)
    if what == "special":
        name, *arguments = given
        if name in ("__repr__", "__str__"):
            return (repr if name == "__repr__" else str)(value)
        return value(*arguments, **named) if name == "__call__" else getattr(type(value), name)(value, *arguments)
    return _TOLD[what](value, *given)


def _await(value: Any) -> Any:
    import asyncio

    return asyncio.run(value)


_TOLD: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "plain": lambda value: next(_PLAIN[kind] for kind in type(value).__mro__ if kind in _PLAIN)(value),
    "is instance": lambda value, one: isinstance(one, value),
    "is subclass": lambda value, one: issubclass(one, value),
    "await": _await,
}


def _check_may_be_told(value: Any, what: str, given: tuple[Any, ...]) -> None:
    own = (value if isinstance(value, type) else type(value)).__module__ == TESTS
    name = given[0] if given else ""
    if what == "special" and (name in SPECIAL or name in ("__repr__", "__str__", "__format__")):
        return
    if what in ("get", "set") and isinstance(name, str) and own and not name.startswith("_"):
        return
    if what == "get" and isinstance(value, _CALLABLE) and name in _TOLD_OF_FUNCTIONS:
        return
    if (what == "plain" and own) or (what in ("is instance", "is subclass") and isinstance(value, type)):
        return
    raise AttributeError(f"the answer may not {what} {name} of a test's {type(value).__name__}")


def _compared(name: str) -> Callable[..., Any]:
    """A comparison by an operator of the answer's class. The order of two objects of the answer is trusted, as the
    result of a method is; equality is never trusted."""

    def compared(self: Remote, other: Any) -> Any:
        if name in _EQUALS or not isinstance(other, Remote) or state_of(self).tainted or state_of(other).tainted:
            raise _distrusted(self, name)
        return _asked(self, "special", name, other)

    return compared


def _combined(name: str, *, own: bool) -> Callable[..., Any]:
    """An arithmetic operator of an object of the answer. With a value of the test, a resulting object is tainted (it
    may be the sum of two vectors), and a plain result is refused, since it may be the difference from what the test
    expects. own: whether the answer's class defines the operator; if not, it is one of a plain type that changes the
    object."""

    def combined(self: Remote, other: Any, *more: Any) -> Any:
        found = _asked(self, "special", name, other, *more)
        if found is NotImplemented:
            return found
        tainted = own and (not isinstance(other, Remote) or state_of(self).tainted or state_of(other).tainted)
        if isinstance(found, Remote):
            state_of(found).tainted |= tainted
            state_of(found).made |= state_of(self).made
        elif tainted:
            raise _distrusted(self, name)
        return found

    return combined


def _number(name: str) -> Callable[..., Any]:
    def number(self: Remote, *arguments: Any) -> Any:
        found = _asked(self, "special", name, *arguments)
        if state_of(self).tainted and not isinstance(found, Remote):
            raise _distrusted(self, name)
        if isinstance(found, Remote):
            state_of(found).tainted |= state_of(self).tainted
        return found

    return number


def _distrusted(stand_in: Remote, name: str) -> Untrusted:
    state_of(stand_in).peer.distrusted.append(name)
    return Untrusted(name)


async def awaited(peer: Values, number: int) -> Any:
    """A coroutine that awaits a coroutine of the other side; that runs there from its beginning to its end."""
    return peer.ask("await", number)
