"""PPO's four roles on one card, as docs/memory.md says it."""

from benchmarks.learner.four_roles import BEGIN, DOCUMENT, END, report, rows
from cluster.memory.shape import GB, total


def test_the_document_has_the_table_as_it_is_made_and_only_one_base_fits() -> None:
    assert DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0] == report()
    sums = [total(row.parts) / GB for row in rows()]
    assert sums == sorted(sums, reverse=True)
    assert sums[1] > 80 > sums[2]
