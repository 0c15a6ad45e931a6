"""What Ray would not start with, and would only say after a minute."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cluster.placement import PlacementError
from learner.driver.machine_checks import check_startable


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTHONWARNINGS", "ignore,e::DeprecationWarning"),
        ("PYTHONWARNINGS", "error::UserWarning"),
        ("PYTHONOPTIMIZE", "3"),
    ],
)
def test_a_variable_with_which_its_processes_end_is_named(name: str, value: str) -> None:
    with pytest.raises(PlacementError, match=f"^{name}: .*got .*{value}.*; unset it"):
        check_startable({name: value})


@pytest.mark.parametrize(
    "environ",
    [
        {"PYTHONWARNINGS": "ignore::FutureWarning", "PYTHONOPTIMIZE": "1"},
        {"PYTHONWARNINGS": "error::UserWarning:my_rewards", "PYTHONOPTIMIZE": "yes"},
        {"PYTHONWARNINGS": "", "PYTHONOPTIMIZE": ""},
    ],
)
def test_others_do_no_harm(environ: dict[str, str]) -> None:
    check_startable(environ)


def test_a_machine_whose_loopback_interface_is_off() -> None:
    apart = ["unshare", "--net", "--map-root-user"]
    try:
        if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
            pytest.skip("no network of one's own may be made here")
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    call = "from learner.driver.machine_checks import check_startable; check_startable()"
    told = subprocess.run(
        [*apart, sys.executable, "-c", call], capture_output=True, text=True, check=False, timeout=60
    ).stderr
    assert "PlacementError: cluster.address: local needs the loopback interface" in told
