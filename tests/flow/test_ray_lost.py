"""One of Ray's own processes is killed under a private cluster: which one is said, soon, and the end is no hang."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import asyncio, os
from cluster.placement import Role
from cluster.ray_cluster import connect
from tests.flow.stand_ins import Sleeper

async def main():
    session = connect("local", min_cpus=2)
    role = Role("sleeper", 1, 0)
    await session.reserve([role], 60)
    actor = session.spawn(role, Sleeper, [], {})
    await actor.ready(60)
    for kind, processes in session.ray_processes._node.all_processes.items():
        print("pid", kind, processes[0].process.pid, flush=True)
    calling = asyncio.create_task(actor.call(Sleeper.sleep, 100, 60))
    watching = asyncio.create_task(session.ray_processes.watch())
    done, _ = await asyncio.wait({calling, watching}, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        print("told", type(task.exception()).__name__, task.exception(), flush=True)
    watching.cancel()
    await session.close()
    print("closed", flush=True)
    os._exit(0)  # as learner.main does

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("process", "said"),
    [
        ("gcs_server", r"Ray's gcs_server \(pid {pid} on {node}\) has ended \(signal 9\), and no process of the run"),
        ("ray::DashboardAgent", r"Ray's raylet .* has ended \(exit code 0, as its dashboard_agent had\), and no"),
    ],
)
def test_the_loss_of_a_process_of_ray_is_named_within_seconds(process: str, said: str) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, cwd=os.getcwd(), env=dict(os.environ)
    )
    assert run.stdout is not None
    pids: dict[str, int] = {}
    for line in run.stdout:
        if line.startswith("pid "):
            _, kind, pid = line.split()
            pids[kind] = int(pid)
        if "raylet" in pids:
            break
    pids |= _children(pids["raylet"])
    time.sleep(1)
    os.kill(pids[process], signal.SIGKILL)
    killed = time.monotonic()
    told, _ = run.communicate(timeout=60)
    assert re.search("told ClusterLost " + said.format(pid=pids[process], node=os.uname().nodename), told)
    assert "closed" in told
    assert time.monotonic() - killed < 15
    assert run.returncode == 0


def _children(parent: int) -> dict[str, int]:
    listed = subprocess.run(["ps", "--ppid", str(parent), "-o", "pid=,args="], capture_output=True, text=True).stdout
    return {words[1]: int(words[0]) for line in listed.splitlines() if (words := line.split())}
