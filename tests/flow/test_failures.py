"""What a user sees when processes of a real run are lost: the last line, and how the run goes on."""

import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from cluster.config import Deadlines
from examples.random_model import make_tiny_model
from rollout import ledger
from tests.flow.run import Run, wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", family="Llama")


def learners(run: Run) -> set[int]:
    return {pid for pid, command in run.processes().items() if "ray::learner" in command}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_learner_that_dies_and_one_that_hangs_are_replaced(tmp_path: Path, model: Path) -> None:
    """The third learner ends a run of as many steps, each of which stands there once."""
    run = Run(tmp_path, model, steps=40, checkpoint={"every": 2}, cluster={"patience": 0.1})
    process = run.start("learner.restarts=2", "learner.learning_rate=1e-4", "data.eval.every=20")
    reached = 0
    for ends in (signal.SIGKILL, signal.SIGSTOP):
        wait_until(partial(_is_past, run, reached + 2), "more than two steps", 240, process)
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()  # nothing that comes imports it
        (lost,) = learners(run)
        os.kill(lost, ends)
        reached = _steps(run)[-1]
        wait_until(partial(_has_another_than, run, lost), "another learner", 120, process)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    killed = r"learner: process died during \w+: pid \d+: it was killed by a signal .*"
    hung = r"learner: \w+ is without an answer, and so is its process, for \d+ s: it hangs .*"
    for number, said in enumerate((killed, hung), start=1):
        assert re.search(rf"{said}; restart {number} of 2, with fresh processes, from step \d+\n", output), output
    assert _steps(run) == list(range(41))
    rows = [ledger.read(path) for path in ledger.steps(run.folder / "rollouts")]
    places = [place for step in rows for place in dict.fromkeys(step.column("position").to_pylist())]
    assert places == list(range(120))
    wait_until(lambda: run.processes() == {}, "all processes to end", seconds=30)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_that_stands_still_as_a_whole_goes_on_as_if_nothing_had_been(tmp_path: Path, model: Path) -> None:
    """A paused container, a lid that is closed: for longer than each deadline. Nothing is lost, nor taken for hung."""
    longest = Deadlines.of(0.1).group
    run = Run(tmp_path, model, steps=12, cluster={"patience": 0.1, "rewards": {"processes": 1}})
    process = run.start()
    wait_until(partial(_is_past, run, 2), "a step", 240, process)
    everyone: list[int] = []
    while more := [pid for pid in run.processes() if pid not in everyone]:  # those that were started meanwhile, too
        for pid in more:
            os.kill(pid, signal.SIGSTOP)
        everyone += more
    time.sleep(1.2 * longest)
    for pid in everyone:
        os.kill(pid, signal.SIGCONT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert not re.search("lost|hangs|fresh process|no answer", output), output
    assert _steps(run) == list(range(13))
    assert run.metrics()[-1]["rollout/restarts"] == run.metrics()[-1]["rollout/begun_anew"] == 0


def _steps(run: Run) -> list[int]:
    return [line["step"] for line in run.metrics()]


def _is_past(run: Run, step: int) -> bool:
    return max([0, *_steps(run)]) > step


def _has_another_than(run: Run, lost: int) -> bool:
    return learners(run) - {lost} != set()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_sigterm_before_the_run_has_begun_is_what_ctrl_c_is(tmp_path: Path, model: Path) -> None:
    run = Run(tmp_path, model)
    process = run.start()
    wait_until(lambda: learners(run) != set(), "the learner's process", 60, process)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.splitlines()[-1]) == (130, "stopped before the run began"), output
    assert not (run.folder / "checkpoints").exists()
    wait_until(lambda: run.processes() == {}, "all processes to end", seconds=30)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_sigterm_while_ray_starts_leaves_no_process(tmp_path: Path, model: Path) -> None:
    run = Run(tmp_path, model)
    process = run.start()
    wait_until(lambda: _agents(run) != [], "Ray's agents", 60, process)
    agents = _agents(run)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.splitlines()[-1]) == (130, "stopped before the run began"), output
    assert psutil.wait_procs(agents, timeout=5)[1] == []  # after a raylet killed alone they run on for 10 s and more
    wait_until(lambda: run.processes() == {}, "all processes to end", seconds=5)


def _named(run: Run) -> dict[str, int]:
    """Programs and roles of a run, with their pids."""
    return {Path(command.partition(" ")[0]).name: pid for pid, command in run.processes().items()}


def _agents(run: Run) -> list[psutil.Process]:
    raylet = _named(run).get("raylet")
    return [] if raylet is None else psutil.Process(raylet).children()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_warnings_to_all_and_sigterm_to_the_group_of_a_run_that_nobody_reads_are_one_request(
    tmp_path: Path, model: Path
) -> None:
    """As Slurm warns, and GNU's timeout ends a process and its group. What the run says goes on in a file."""
    run = Run(tmp_path, model, steps=400)
    process = run.start()
    wait_until(lambda: _is_past(run, 0), "a step", 120, process)
    named = _named(run)
    assert process.pid not in {os.getpgid(named[name]) for name in ("gcs_server", "raylet")}
    assert process.stdout is not None
    process.stdout.close()
    console = run.folder / "console.log"
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        for pid in run.processes():
            os.kill(pid, number)
    process.terminate()
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    said = console.read_text().splitlines()
    assert re.fullmatch(r"stopped  at step \d+ of 400; the same command goes on from there", said[-1]), said
    wait_until(lambda: run.processes() == {}, "all processes to end", seconds=5)


@pytest.mark.timeout(200)
def test_sigterm_to_all_processes_ends_the_run_which_can_go_on(tmp_path: Path, model: Path) -> None:
    """As service managers and Slurm send it: whatever was not finished by then, a checkpoint is there, and an end."""
    run = Run(tmp_path, model, steps=400)
    process = run.start()
    wait_until(lambda: _is_past(run, 2), "a checkpoint", 120, process)
    for pid in run.processes():
        os.kill(pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=90)
    assert process.returncode in (0, 1), output
    assert "the same command goes on from" in output  # Ray may end this process before it says more
    wait_until(lambda: run.processes() == {}, "all processes to end", seconds=30)


WITH_STAND_INS = """
import sys
from learner import main
from learner.driver import roles
from tests.flow import stand_ins
roles.RolloutWorker, roles.make_trainer = stand_ins.Sleeper, stand_ins.refuse
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_last_line_says_why_a_process_does_not_start(tmp_path: Path, model: Path) -> None:
    run = Run(tmp_path, model)
    process = run.start(program=("-c", WITH_STAND_INS))
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 2, output
    said = "error: learner: model.path: config sets logits_scaling=8.0, which the learner does not know"
    assert output.splitlines()[-1] == said, output
    assert not (run.folder / "checkpoints").exists()
    wait_until(lambda: run.processes() == {}, "all processes to end", seconds=30)
