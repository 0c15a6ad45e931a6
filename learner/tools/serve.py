"""The command line of gleaner serve. server.py, which carries it out, is imported when the command runs, so that --help
is fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from learner.main import Request, epilog, natural


@dataclass(frozen=True, slots=True)
class ServeRequest(Request):
    """Answer by what a run has learned, as OpenAI's API does.

    vLLM's own server, with the run's adapter as the model of the run folder's name, and its base as another. Prompts
    are as the client sends them: the system prompt of data.system is not added.
    """

    EPILOG = epilog(
        "gleaner serve runs/demo-seed0",
        "gleaner serve runs/demo-seed0 --port 9000 -- --max-model-len 2048",
        failed="vLLM could not start",
    )

    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder with a checkpoint.")]
    more: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTIONS", help="Options of vLLM's server, after two dashes.")
    ] = None
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where it listens; 0.0.0.0 is for everybody on the network.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(parser=natural, metavar="N", help="The port.")] = 8000


def run(asked: ServeRequest) -> int:
    """Exit code: as of learner.tools.reported; it returns only where the server cannot be started."""
    from learner.tools.reported import reported
    from learner.tools.server import serve

    return reported(lambda: serve(asked.run, asked.host, asked.port, asked.more or []))
