"""Whose groups get a second producer, by hand-worked times."""

from cluster.backups import Backups
from cluster.group_slot import Ticket


def ticket(since: float, *holders: str) -> Ticket:
    return Ticket(0, since, list(holders))


def test_a_group_is_late_after_twice_the_usual_time_unless_it_has_two_producers_or_nobody_wants_it() -> None:
    backups = Backups(2.0)
    old, helped, stopped, young = ticket(0, "a"), ticket(1, "a", "b"), ticket(2, "a"), ticket(9, "a")
    stopped.stop(late=False)
    tickets = [old, helped, stopped, young]
    assert backups.overdue(tickets, 100.0) == ([], None)  # what is usual is not known yet
    for seconds in (1.0, 4.0, 7.0):
        backups.finished(ticket(0, "b"), "b", seconds)
    assert backups.overdue(tickets, 7.5) == ([], 8.0)
    assert backups.overdue(tickets, 10.5) == ([old], 17.0)
    assert backups.overdue(tickets, 17.0) == ([old, young], None)


def test_a_producer_is_slow_from_a_race_that_its_own_group_lost_until_it_is_first_again() -> None:
    backups = Backups(2.0)
    mine, other = ticket(5, "slow"), ticket(6, "quick")
    backups.finished(ticket(0, "quick", "slow"), "quick", 4.0)  # who helps and is later began later, too
    assert (backups.overdue([mine, other], 7.0), backups.full([mine, other])) == (([], 13.0), set())
    backups.finished(ticket(0, "slow", "quick"), "quick", 4.0)
    assert (backups.overdue([mine, other], 7.0), backups.full([mine, other])) == (([mine], 13.0), {"slow"})
    assert backups.full([other]) == set()
    backups.finished(mine, "slow", 4.0)
    assert (backups.overdue([mine, other], 7.0), backups.full([mine, other])) == (([], 13.0), set())
