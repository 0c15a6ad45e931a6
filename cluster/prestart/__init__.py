"""Processes of roles that import while the checks of a start and Ray's own start are still at work.

    driver --starts--> worker.py: imports what all roles do, and is forked: imports what generators do, or the learner,
                       and is forked for each role: waits at a socket ... is handed a worker's arguments, becomes it
    raylet --starts--> shim.py: hands over what Ray gave it, and stays until that process ends

Ray starts a role's worker by the command in its runtime_env (`py_executable`); that of a prestarted role is the shim.
Where no prestarted process waits (it has failed, is late, or was handed over already, as when a role is revived), the
shim becomes Ray's ordinary worker. So nothing depends on a prestarted process but the seconds of a start.
"""
