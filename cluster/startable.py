"""Whether Ray's processes start on this machine, as far as its environment and network decide: where they do not, Ray
waits for a minute or for ever, and says that it is overloaded."""

import os
import socket
from collections.abc import Mapping

from cluster.placement import PlacementError
from cluster.ray_temp_dir import root

ERRORS = "error"  # of PYTHONWARNINGS, which may be cut short
CONNECT_S = 5.0  # to this machine itself


def check_startable(environ: Mapping[str, str] = os.environ) -> None:
    """Raises PlacementError."""
    for warnings in environ.get("PYTHONWARNINGS", "").split(","):
        action, *fields = (field.strip() for field in warnings.split(":"))
        if action and ERRORS.startswith(action) and not any(fields[2:3]):  # of all modules
            raise PlacementError(
                f"PYTHONWARNINGS: must make no error of warnings, since Ray's processes warn as they start and would "
                f"end, got {environ['PYTHONWARNINGS']!r}; unset it, or name a module of yours in it"
            )
    if (level := environ.get("PYTHONOPTIMIZE", "")).isdecimal() and int(level) > 1:
        raise PlacementError(
            f"PYTHONOPTIMIZE: must be at most 1, since Ray's processes need their docstrings, got {level}; unset it"
        )
    root()
    _check_loopback()


def _check_loopback() -> None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_S).close()
    except OSError as error:
        raise PlacementError(
            f"cluster.address: local needs the loopback interface, by which the processes of a run talk, and 127.0.0.1 "
            f"does not answer ({error.strerror or error}); switch it on (ip link set lo up)"
        ) from None
