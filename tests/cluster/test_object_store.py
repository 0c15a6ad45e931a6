"""How large a private cluster's object store is: a pure function."""

from cluster.ray_cluster import GROUPS_BYTES, store_bytes

GIB = 2**30


def test_it_has_room_for_two_policies_and_leaves_some_of_shared_memory() -> None:
    assert store_bytes(0, 64 * GIB) == GROUPS_BYTES
    assert store_bytes(16 * GIB, 64 * GIB) == GROUPS_BYTES + 32 * GIB
    assert store_bytes(16 * GIB, 20 * GIB) == 18 * GIB
    assert store_bytes(16 * GIB, 64 * 2**20) == GROUPS_BYTES  # Ray puts it on a disk then, and says so
