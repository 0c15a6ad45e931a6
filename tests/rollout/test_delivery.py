"""A delivery is proven: by the digest of the bytes, by the tensors in use, and by the logprobs of probe tokens."""

import json
from pathlib import Path

import numpy as np
import pytest

from rollout.delivery import FEW, KEPT, Answer, Evidence, Push, Stuck, check_digest, difference
from rollout.types import Adapter, Held
from tests.pushes import pushed, said

ADAPTER = Adapter.build(17, b"weights", {})
NEW = [-1.0, -2.0, -3.0]
IDS = tuple(range(65))
# Logprobs of one probe, in bfloat16 on the demo's model. honest: of a real engine and a real learner under learner.mode
# full, at two versions; of one token the two sides differ by 0.8 and 1.3 nats. faults: of the trained model, and of it
# with something wrong: the weights before training, 16 tokens of another text in its past, GELU for SiLU.
ANSWERS = {
    kind: {name: np.array(logprobs, np.float32) for name, logprobs in found.items()}
    for kind, found in json.loads((Path(__file__).parent / "probe_answers.json").read_text()).items()
}


def holding(**tensors: str) -> Answer:
    return said(NEW)._replace(held=Held(tensors))


async def verify(answer: Answer, expected: Answer, dtype: str = "float32") -> None:
    await pushed(ADAPTER, (1, 2, 3, 4), expected, dtype).verify("generator-0", answer, Evidence())


@pytest.mark.parametrize("answer", [[-1.0, -2.0, -3.002], [-1.0, float("nan"), -3.0]])
async def test_another_policy_is_named_with_worker_version_and_difference(answer: list[float]) -> None:
    apart = "nan" if np.isnan(answer).any() else "0.002"
    verdict = rf"generator-0: adapter v17 is not .* {apart} nats, allowed is 0\.001 \(float32\)"
    await verify(said([-1.0, -2.0004, -3.0]), said(NEW))
    with pytest.raises(RuntimeError, match=verdict):
        await verify(said(answer), said(NEW))


def test_in_16_bits_the_worst_token_says_nothing_unless_it_is_none() -> None:
    expected, found = np.array([-1, -2, -3], np.float32), np.array([-1.3, -1.6, -12], np.float32)
    assert difference(found, expected, "float32") == pytest.approx(9)
    assert difference(found, expected, "bfloat16") == pytest.approx(np.sqrt((0.3**2 + 0.4**2) / 2))
    assert difference(found[:1], expected[:1], "bfloat16") == pytest.approx(0.3)
    for wrong in (np.nan, -np.inf):
        found[1] = wrong
        assert not np.isfinite(difference(found, expected, "bfloat16"))


async def test_one_unlikely_token_stops_no_run_whose_policy_arrived() -> None:
    honest, evidence = ANSWERS["honest"], Evidence()
    assert np.abs(honest["engine now"] - honest["learner now"]).max() > 1.3
    for version, when in ((29, "then"), (41, "now")):
        push = pushed(Adapter.build(version, b"weights", {}), IDS, said(honest[f"learner {when}"]), "bfloat16")
        await push.verify("generator-0", said(honest[f"engine {when}"]), evidence)
    frozen = Evidence()
    assert frozen.add(29, IDS, honest["engine then"], honest["learner then"]) is None
    stuck = frozen.add(41, IDS, honest["engine then"], honest["learner now"])
    assert stuck is not None
    assert (stuck.since, stuck.share) == (29, 0)


def test_no_accusation_hangs_on_one_token() -> None:
    """The learner goes 0.01 nats on each of 64 tokens, of the odd ones 5, where the engine stays."""

    def found(odd: int, bias: float = 0.0) -> tuple[Stuck | None, bool]:
        evidence, then, way = Evidence(), np.full(64, -9, np.float32), np.full(64, 0.01, np.float32)
        way[:odd] = 5
        gone = np.where(way == 5, np.float32(0), way)
        evidence.add(0, IDS, then + np.float32(bias), then)
        return evidence.add(1, IDS, then + np.float32(bias) + gone, then + way), evidence.settled

    assert found(1) == (None, True)
    assert found(1, bias=0.006) == (None, False)  # nor would a frozen engine be found out by one
    stuck, _ = found(2)
    assert stuck is not None
    assert stuck.share == pytest.approx(0.62 / 5.62, rel=1e-3)
    assert stuck.way == pytest.approx(5.62 / 63, rel=1e-3)


@pytest.mark.parametrize("fault", ["another base", "another cache block", "another kernel"])
async def test_a_fault_that_is_not_of_one_token_stops_the_run(fault: str) -> None:
    faults = ANSWERS["faults"]
    with pytest.raises(RuntimeError, match=r"nats, allowed is 0\.2 \(bfloat16\)"):
        await verify(said(faults[fault]), said(faults["learner"]), "bfloat16")


def test_corrupt_bytes_are_caught_before_any_probe() -> None:
    digest = Adapter.build(17, b"weights'", {}).digest
    verdict = f"generator-0: policy v17 .* {digest[:12]}, sent was {ADAPTER.digest[:12]}"
    with pytest.raises(RuntimeError, match=verdict):
        check_digest(ADAPTER, "generator-0", digest)
    check_digest(ADAPTER, "generator-0", ADAPTER.digest)


async def test_tensors_other_than_those_sent_are_counted_and_the_first_is_named() -> None:
    sent = holding(q="1", k="2", v="3")
    await verify(sent, sent)
    for found, sentence in {
        "2 of 3 differ, first k": holding(q="1", k="1", v="1"),
        "1 of 3 differ, first v": holding(q="1", k="2"),  # vLLM never had it
        "1 of 3 differ, first o": holding(q="1", k="2", v="3", o="4"),  # left over of another adapter
        "3 of 3 differ, first k": holding(),
    }.items():
        with pytest.raises(RuntimeError, match=rf"generator-0: acknowledged v17, but .*: {found}\. The run stops"):
            await verify(sentence, sent)


async def test_what_cannot_be_read_is_left_to_the_logprobs() -> None:
    sent = holding(q="1", k="2")
    await verify(said(NEW)._replace(held=Held({"q": "1"}, unread=("k",))), sent)
    with pytest.raises(RuntimeError, match="1 of 2 differ, first k"):
        await verify(said(NEW)._replace(held=Held({"q": "1", "k": "1"}, unread=("k",))), sent)


class Story:
    """Logprobs over the versions: the policy drifts by `step` nats a token and version; engine and learner each add
    rounding noise of their own, and the engine a bias that stays."""

    def __init__(self, step: float, noise: float, bias: float, seed: int = 0) -> None:
        self.rng, self.step, self.noise = np.random.default_rng(seed), step, noise
        self.direction = self.rng.choice([-1.0, 1.0], 64)
        self.bias = bias * self.rng.standard_normal(64)

    def learner(self, version: int) -> np.ndarray:
        noise = self.noise * self.rng.standard_normal(64)
        return (-3 + self.step * version * self.direction + noise).astype(np.float32)

    def engine(self, version: int) -> np.ndarray:
        return self.learner(version) + np.float32(self.bias)


@pytest.mark.parametrize(("step", "after"), [(1e-1, 1), (1e-2, 3), (1e-3, 20)])
def test_a_frozen_engine_falls_behind_until_it_shows(step: float, after: int) -> None:
    """Not at once where bias and noise are 1e-2 nats, twice which the learner has to go."""
    story, evidence = Story(step, noise=2e-3, bias=1e-2), Evidence()
    frozen = story.engine(0)
    for version in range(60):
        stuck = evidence.add(version, IDS, frozen, story.learner(version))
        if stuck is not None:
            break
    assert abs(version - after) <= after // 3
    assert stuck is not None
    assert abs(stuck.share) < 0.1
    assert (stuck.since, stuck.way > 0.01) == (0, True)


async def test_a_push_names_the_version_that_its_engine_is_stuck_at() -> None:
    """Whatever it says of its tensors: the learner goes 0.09 nats a version, within the tolerance of bfloat16."""
    evidence, still = Evidence(), [-1.0] * 64

    def push(version: int, ids: tuple[int, ...] = IDS) -> Push:
        expected = said([-1.0 - 0.09 * (version - 17)] * 64)
        return pushed(Adapter.build(version, b"weights", {}), ids, expected, "bfloat16")

    await push(17).verify("generator-0", said(still), evidence)
    verdict = r"generator-0: acknowledged v18, but generates as under v17: .* went 0\.09 nats, its own went 0% of that"
    with pytest.raises(RuntimeError, match=verdict):
        await push(18).verify("generator-0", said(still), evidence)
    await push(18).verify("generator-1", said([-1.09] * 64), Evidence())
    await push(19, (*IDS, 7)).verify(
        "generator-0", said(still), evidence
    )  # of other tokens there is nothing to compare


@pytest.mark.parametrize("step", [0.0, 1e-5, 1e-3, 3e-2])
@pytest.mark.parametrize("bias", [0.0, 1e-2])
def test_an_engine_with_noise_and_bias_is_not_accused(step: float, bias: float) -> None:
    for seed in range(8):
        story, evidence = Story(step, 2e-3, bias, seed), Evidence()
        for version in range(60):
            assert evidence.add(version, IDS, story.engine(version), story.learner(version)) is None
        assert evidence.settled is (step >= 1e-3)


def test_evidence_is_of_the_same_tokens_and_of_enough_of_them() -> None:
    story, evidence = Story(0.1, 0.0, 0.0), Evidence()
    still = story.learner(0)
    for version in range(4):  # other tokens each time: nothing to compare
        assert evidence.add(version, (version, *IDS), still, story.learner(version)) is None
        assert not evidence.settled
    few = slice(0, FEW - 1)
    for version in range(4):
        assert evidence.add(version, IDS[:FEW], still[few], story.learner(version)[few]) is None
    slow = Evidence()
    for version in range(3 * KEPT):  # the first is kept for ever
        assert slow.add(version, IDS, still, still) is None
        assert slow.settled is False
    assert slow.add(3 * KEPT, IDS, still, story.learner(1)).since == 0  # type: ignore[union-attr]
    enough = Evidence()
    for version in range(2):
        stuck = enough.add(version, IDS[: FEW + 1], still[:FEW], story.learner(version)[:FEW])
    assert stuck is not None


def test_the_first_answers_and_the_last_few_are_what_the_next_is_compared_with() -> None:
    """The first says nothing here, since the engine was far off then; of equals the oldest that is kept is named."""
    first, same, moved = np.zeros(64, np.float32), np.full(64, -1, np.float32), np.full(64, -1.5, np.float32)
    evidence, versions = Evidence(), 2 * KEPT
    assert evidence.settled is False
    evidence.add(0, IDS, first, np.full(64, -9, np.float32))
    for version in range(1, versions + 1):
        assert evidence.add(version, IDS, same, same) is None
    assert evidence.add(versions + 1, IDS, same, moved) == (versions - KEPT + 1, 0, 0.5)
    # 0.15 of the way since the first, 0.17 since the second: it is the least that counts.
    other = Evidence()
    other.add(0, IDS, same, same)
    eighth = np.full(64, -1.0625, np.float32)
    assert other.add(1, IDS, eighth, moved) == (0, 0.125, 0.5)
    fifth = Evidence()
    fifth.add(0, IDS, same, same)
    assert fifth.add(1, IDS, np.full(64, -1.11, np.float32), moved) is None
    stuck = other.add(2, IDS, np.full(64, -1.3, np.float32), np.full(64, -3, np.float32))
    assert stuck is not None
    assert stuck._asdict() == {"since": 0, "share": pytest.approx(0.15), "way": 2}
