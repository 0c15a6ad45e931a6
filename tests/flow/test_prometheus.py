"""The tracker prometheus: what Ray's agent shows of a run, scraped over HTTP, and what the dashboard asks it for."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.trackers import shown
from tests.flow.run import metrics_page, wait_until
from tests.test_documents import explained, metrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "gleaner-dashboard.json"
FIXED = [name for name in explained() if "<" not in name]
FUNCTION = 'my "own" \\ function'
TOLD = dict.fromkeys(FIXED, 0.5) | {
    f"reward/{FUNCTION}": 0.25, "reward/status_error": 2.0, "reward/status_none": 1.0, "eval/number": 1.0,
    "policy/staleness_1": 0.75, "env/found": 3.0, "env/outcome_done": 1.0, "rollout/tokens": 100.0,
}  # fmt: skip
DRIVER = """
import asyncio, json, sys
from pathlib import Path
from cluster.ray_cluster import connect
from cluster.telemetry import Metrics
session = connect("local", min_cpus=1, shows_metrics=True)
folder, told = Path(sys.argv[1]), json.loads(sys.argv[2])
for step in (1, 2):  # as a run that has lost its learner, and goes on in the same process
    metrics = Metrics(folder, ["prometheus"], step - 1)
    metrics.log(step, told)
    if step == 2:
        sys.stdin.readline()
    metrics.close()
asyncio.run(session.close())
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a driver in a private cluster that has told the metrics of two steps, and lives."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "plan.json").write_text(json.dumps({"learner": {"planned": 2**30}, "generator": {"planned": None}}))
    soon = {"RAY_metrics_report_interval_ms": "1000"}
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | soon
    words = [sys.executable, "-c", DRIVER, str(folder), json.dumps(TOLD)]
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, text=True) as driver:
        wait_until(lambda: _found(folder).get(("ray_gleaner_steps_total", "")) == 2, "two steps", 60, driver)
        yield folder
        driver.communicate("\n", timeout=60)
    assert driver.returncode == 0
    assert not (folder / "prometheus.json").exists()


def _found(run_dir: Path) -> dict[tuple[str, str], float]:
    """Metrics of gleaner at the address that the run folder names: (name, value of the label that is neither the run's
    nor Ray's own, or '') -> value. Nothing as long as there is no address."""
    found, families = {}, list(text_string_to_metric_families(metrics_page(run_dir)))
    for sample in (sample for family in families for sample in family.samples if "gleaner" in sample.name):
        own = {key: value for key, value in sample.labels.items() if key.islower() and not key.startswith("otel_")}
        assert own.pop("run") == run_dir.name
        found[sample.name, "".join(own.values())] = sample.value
    return found


@pytest.mark.long
def test_all_that_a_run_tells_is_scraped_and_the_dashboard_asks_for_nothing_else(run_dir: Path) -> None:
    assert '"127.0.0.1:' in (run_dir / "prometheus.json").read_text()
    time.sleep(2.5)  # after which Ray, with a report a second, would have forgotten what was told once
    found = _found(run_dir)
    gauges = {(f"ray_{shown(told).name}", "".join(shown(told).labels.values())): v for told, v in TOLD.items()}
    assert {key: found.get(key) for key in gauges} == gauges
    assert found["ray_gleaner_reward", FUNCTION] == 0.25
    assert found["ray_gleaner_policy_staleness", "1"] == 0.75
    assert found["ray_gleaner_reward_failures_total", "error"] == 4
    assert ("ray_gleaner_reward_failures_total", "none") not in found
    assert (found["ray_gleaner_tokens_total", ""], found["ray_gleaner_step", ""]) == (200, 2)
    assert found["ray_gleaner_memory_learner_planned", ""] == 2**30
    of_no_plan = {"ray_gleaner_memory_generator_planned"}
    queried = set(re.findall(r"ray_gleaner_\w+", DASHBOARD.read_text()))
    assert queried - {name for name, _ in found} == of_no_plan


def test_what_a_run_tells_of_itself_has_no_label() -> None:
    """A new metric whose name looks like that of a reward function would be shown as one."""
    ours = {name for name in metrics() if not name.endswith("_")}
    assert len(ours) > 50
    assert {told: shown(told).labels for told in ours if shown(told).labels} == {}


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
