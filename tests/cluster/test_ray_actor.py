"""The start of a role, without its process."""

import gc

import pytest

from cluster.ray_actor import Host, in_one_line


async def test_garbage_is_collected_again_after_the_object_is_built_and_after_it_failed() -> None:
    during = []
    assert gc.isenabled()
    Host(lambda: during.append(gc.isenabled()), ())
    assert during == [False]
    assert gc.isenabled()
    failed = Host(lambda: 1 / 0, ())
    assert gc.isenabled()
    started = await failed.started()
    assert (started.error, started.wrong_input) == ("ZeroDivisionError: division by zero", False)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a:\n  b"), "a: b"),
        (RuntimeError(""), "RuntimeError: "),
        (KeyError("a"), "KeyError: 'a'"),
        (ValueError("x" * 501), "x" * 500 + "..."),
    ],
)
def test_an_exception_on_one_line(error: Exception, line: str) -> None:
    assert in_one_line(error) == line
