"""The start of a role, without its process."""

import gc

import pytest

from cluster.ray_actor import Host


def test_garbage_is_collected_again_after_the_object_is_built_and_after_it_failed() -> None:
    during = []
    assert gc.isenabled()
    Host(lambda: during.append(gc.isenabled()), ())
    assert during == [False]
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        Host(lambda: 1 / 0, ())
    assert gc.isenabled()
