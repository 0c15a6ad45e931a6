"""Real Ray processes: death, hanging and errors of an actor, seen from the caller."""

import asyncio
import ctypes
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pyarrow as pa
import pytest
import pytest_asyncio

from cluster.actor import ActorDied, DeadlineExceeded, RemoteError, Shared, StartFailed, Unusable, ValueLost
from cluster.errors import WrongInput
from cluster.placement import Role
from cluster.ray_cluster import Session, connect
from learner.driver.failure import tell
from rollout.fakes import make_group

ENOUGH_S = 300  # for what is done in a moment, on a machine that is busy with other things


class Letter:
    """Counts how often it was serialised here."""

    def __init__(self, text: bytes) -> None:
        self.text, self.posted = text, 0

    def __getstate__(self) -> dict[str, bytes]:
        self.posted += 1
        return {"text": self.text}


class Toy:
    """Counts its calls, so that a fresh process is told from an old one. trouble: what its constructor comes to."""

    def __init__(self, trouble: str = "none") -> None:
        if trouble == "refuses":
            raise ValueError("lora.targets: no layer is\nnamed q_porj")
        if trouble == "wrong input":
            raise WrongInput("model.path: model.safetensors is cut; copy it again")
        if trouble == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls = 0

    async def count(self) -> int:
        self.calls += 1
        return self.calls

    async def pid(self) -> int:
        return os.getpid()

    async def title(self) -> str:
        return Path("/proc/self/cmdline").read_text().strip("\0")

    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    async def fail(self) -> None:
        raise KeyError("no such thing")

    async def lose(self) -> None:
        raise ValueLost("weights v1: they are gone")

    async def give_up(self) -> None:
        raise TimeoutError("the object's own wait")

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def size(self, letter: Letter) -> int:
        return len(letter.text)

    async def sent(self, table: pa.Table) -> bytes:
        import ray.cloudpickle

        sent: bytes = ray.cloudpickle.dumps(table, protocol=5)
        return sent

    async def die(self, how: str) -> None:
        if how == "worn out":
            raise Unusable("the engine died of it")
        if how == "crash":
            ctypes.string_at(0)
        sys.exit(3)


DEATHS = [  # how, what is said of it, and what is compared with the next death
    ("crash", "pid [0-9]+: Fatal Python error: Segmentation fault$", "Fatal Python error: Segmentation fault"),
    ("sys.exit", "process died during die: pid [0-9]+: exit code 3$", "exit code 3"),
]
ROLES = [Role("toy", 1, 0), Role("once", 0.5, 0), Role("broken", 0.5, 0)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session() -> AsyncIterator[Session]:
    """One private cluster for the whole file."""
    session = connect("local", min_cpus=2)
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # this file is no module in an actor's process
    await session.reserve(ROLES, deadline_s=ENOUGH_S)
    yield session
    await session.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_dead_process_is_said_and_replaced(session: Session) -> None:
    toy = session.spawn(ROLES[0], Toy, [], {"GREETING": "hello"})
    await toy.ready(ENOUGH_S)
    assert [await toy.call(Toy.count, ENOUGH_S) for _ in range(2)] == [1, 2]
    assert (await toy.call(Toy.title, ENOUGH_S)).startswith("ray::toy")
    assert await toy.call(Toy.variable, ENOUGH_S, "GREETING") == "hello"
    assert await toy.call(Toy.variable, ENOUGH_S, "CUDA_VISIBLE_DEVICES") == ""  # no GPU asked for, none seen
    with pytest.raises(RemoteError, match=r"(?s)toy: fail failed: KeyError.*no such thing"):
        await toy.call(Toy.fail, ENOUGH_S)
    with pytest.raises(ValueLost, match="^toy: lose: weights v1: they are gone$"):
        await toy.call(Toy.lose, ENOUGH_S)
    with pytest.raises(RemoteError, match="give_up failed: TimeoutError.*own wait"):  # not a deadline of the call
        await toy.call(Toy.give_up, ENOUGH_S)

    with pytest.raises(ActorDied, match="^toy: the engine died of it$") as died:
        await toy.call(Toy.die, ENOUGH_S, "worn out")
    assert died.value.reason == "the engine died of it"
    for how, said, reason in DEATHS:
        with pytest.raises(ActorDied, match=said) as died:
            await toy.call(Toy.die, ENOUGH_S, how)
        assert died.value.reason == reason
        with pytest.raises(ActorDied, match="toy: "):  # nothing comes back behind the caller's back
            await toy.call(Toy.die, ENOUGH_S, how)
        await toy.revive(deadline_s=ENOUGH_S)
        assert await toy.call(Toy.count, ENOUGH_S) == 1

    hung = await toy.call(Toy.pid, ENOUGH_S)
    os.kill(hung, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match=r"toy: count gave no answer within 1 s \(last answer \d+ s ago\)"):
        await toy.call(Toy.count, 1)
    with pytest.raises(DeadlineExceeded, match="toy: pulse gave no answer within 1 s"):
        await toy.until_ended(1)
    await toy.revive(deadline_s=ENOUGH_S)
    with pytest.raises(TimeoutError):  # it answers, so it is only waited for
        async with asyncio.timeout(4):
            await toy.until_ended(3)
    assert await toy.call(Toy.pid, ENOUGH_S) != hung
    await toy.kill()


async def test_what_is_shared_is_serialised_once_for_all_who_get_it(session: Session) -> None:
    toys = [session.spawn(role, Toy, [], {}) for role in ROLES[:2]]
    letter = Letter(bytes(2**20))
    shared = Shared(letter)
    for _ in range(2):
        answers = await asyncio.gather(*(toy.call(Toy.size, ENOUGH_S, shared.argument()) for toy in toys))
        assert answers == [2**20] * 2
    assert letter.posted == 1
    for toy in toys:
        await toy.kill()


async def test_a_pulse_waits_for_no_other_call_however_many_there_are(session: Session) -> None:
    """Ray runs 1000 of an actor at once where it is told no other number."""
    toy = session.spawn(ROLES[0], Toy, [], {})
    await toy.ready(ENOUGH_S)
    waiting = [asyncio.create_task(toy.call(Toy.wait, ENOUGH_S)) for _ in range(1100)]
    await asyncio.sleep(0)
    assert await toy.call(Toy.count, ENOUGH_S) == 1
    await toy.kill()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_constructor_says_in_its_own_words_why_it_failed(session: Session) -> None:
    refuses = session.spawn(ROLES[2], Toy, ["refuses"], {})
    with pytest.raises(StartFailed) as refused:
        await refuses.ready(ENOUGH_S)
    assert (str(refused.value), refused.value.wrong_input) == ("broken: lora.targets: no layer is named q_porj", True)
    assert "in __init__" in refused.value.__notes__[0]  # where it happened
    await refuses.kill()
    wrong = session.spawn(ROLES[2], Toy, ["wrong input"], {})
    with pytest.raises(StartFailed, match="^model.path: model.safetensors is cut; copy it again$") as refused:
        await wrong.ready(ENOUGH_S)
    assert refused.value.wrong_input
    assert tell(refused.value)[0].startswith("error: model.path: ")  # without a traceback
    await wrong.kill()
    dies = session.spawn(ROLES[2], Toy, ["dies"], {})
    for again in (dies.ready, dies.revive):
        with pytest.raises(ActorDied, match="broken: process died during start: pid [0-9]+: it was killed by a signal"):
            await again(60)


async def test_more_than_the_cluster_has_is_refused_at_once(session: Session) -> None:
    with pytest.raises(WrongInput, match="needs 1 CPU and 1 GPU"):
        await session.reserve([Role("greedy", 1, 1.0)], deadline_s=5)


async def test_a_full_cluster_says_what_is_waited_for(session: Session) -> None:
    notes: list[str] = []
    late = Session("local", None)  # on the same cluster, all of which the module's has reserved
    with pytest.raises(DeadlineExceeded, match="no room after 3.5 s: 1 CPU asked for, 0 free. Stop other jobs"):
        await late.reserve([Role("late", 1, 0)], 3.5, notes.append)
    assert notes == ["waiting up to 3.5 s for room on the cluster: 1 CPU asked for, 0 free"]
    await late.release()


async def test_a_group_travels_without_its_schema_in_both_directions(session: Session) -> None:
    """Ray has a way of its own with tables, which writes every type of every column."""
    import ray.cloudpickle

    toy = session.spawn(ROLES[0], Toy, (), {})
    group = make_group()
    sent = await toy.call(Toy.sent, ENOUGH_S, group)
    assert sent == ray.cloudpickle.dumps(group, protocol=5)
    assert b"behavior_logprobs" not in sent
    assert pickle.loads(sent).equals(group)
