"""PPO's four roles on one card, as docs/ppo.md says it."""

from benchmarks.learner.memory_tables import FOUR_ROLES, four_roles, four_roles_report
from cluster.memory.shape import GB, total


def test_the_document_has_the_table_as_it_is_made_and_only_one_base_fits() -> None:
    assert FOUR_ROLES.text() == four_roles_report()
    sums = [total(row.parts) / GB for row in four_roles()]
    assert sums == sorted(sums, reverse=True)
    assert sums[1] > 80 > sums[2]
