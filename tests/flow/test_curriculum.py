"""A real run with data.curriculum whose driver is killed: each position once, by recorded weights, and a replay that
gives every digest. Another run begins with its rollouts.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from examples.random_model import make_tiny_model
from rollout import ledger
from rollout.data.curriculum import FILE, Estimates, Float, draws, recorded, scores_of
from rollout.schema import group_position, groups_of
from tests.flow.run import Run, wait_until

SIZE = 18  # of the 20 rows two are held out


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_by_recorded_weights_and_is_replayed(tmp_path: Path) -> None:
    run = Run(tmp_path / "one", make_tiny_model(tmp_path / "tiny"), steps=14, max_staleness=1)
    ordered = "data.curriculum=own"
    process = run.start(ordered)
    wait_until(lambda: any(line["step"] >= 8 for line in run.metrics()), "eight steps", 240, process)
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: run.processes() == {}, "all processes to end", seconds=90)
    said = run.finish(ordered)
    assert re.search(r"resumed at step \d+ from", said)

    files = ledger.steps(run.folder / "rollouts")
    groups = [sorted(groups_of(ledger.read(file)), key=group_position) for file in files]
    drawn = {group_position(one)[0]: one.column("problem_id")[0].as_py() for step in groups for one in step}
    assert len(drawn) == sum(map(len, groups)) == 14 * 3
    weights: dict[int, Float] = {}
    ids: list[str] = []
    for file in (run.folder / "curriculum").glob("epoch-*.parquet"):
        kept = recorded(file)
        assert kept is not None
        by_hand, places = Estimates(SIZE), {id: place for place, id in enumerate(kept.ids)}
        for one in (group for step in groups[: kept.step] for group in step):
            by_hand.add(places[one.column("problem_id")[0].as_py()], scores_of(one, "vowels"))
        ((epoch, found),) = kept.weights.items()
        assert np.array_equal(by_hand.weights(), found)
        weights[epoch], ids = found, kept.ids
    assert sorted(weights)[:3] == [0, 1, 2]
    assert len(set(weights[2].tolist())) > 2
    for position, id in drawn.items():
        epoch, place = divmod(position, SIZE)
        order = np.random.default_rng([0, epoch]).permutation(SIZE)
        assert ids[draws(order, weights[epoch], [0, epoch, 1])[place]] == id

    replayed = json.loads(run.gleaner("replay", str(run.folder), "--json"))
    assert (replayed["to"], replayed["same"]) == (14, True)
    assert [line["rollout/weighted_epoch"] for line in run.metrics()[1:]][-1] == max(weights)

    other = Run(tmp_path / "two", tmp_path / "tiny", steps=2, data=_data_of(run))
    said = other.finish(f"data.curriculum={run.folder}")
    assert f"data.curriculum: {run.folder} has rollouts of {len(set(drawn.values()))} of {SIZE} problems" in said
    first = recorded(other.folder / "checkpoints" / "step-000002" / FILE)
    assert first is not None
    assert first.source == "run"
    assert len(set(first.weights[0].tolist())) > 2


def _data_of(run: Run) -> dict[str, object]:
    return {"path": str(run.folder.parents[1] / "data.jsonl"), "eval": {"size": 2, "every": 2}}
