"""gleaner export: writes what a run has learned as a folder for others. This module has only the command line of the
command, so that it can be imported without the modules that command.py needs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from learner.driver import process
from learner.main import Request, epilog, natural


@dataclass(frozen=True, slots=True)
class ExportRequest(Request):
    """Write what a run has learned as a folder for others.

    Weights merged into the base, tokenizer and a model card, for transformers, vLLM and the hub. The folder is loaded
    again, and its logprobs of the run's own completions compared with those of base and adapter, before it is there.
    """

    EPILOG = epilog(
        "gleaner export runs/demo-seed0 my-model",
        "gleaner export runs/demo-seed0 my-model --step 40 --gguf --outtype q8_0",
        "gleaner export runs/demo-seed0 my-adapter --adapter-only --push-to OWNER/NAME",
        failed="what was written is not what was learned, or was not converted or uploaded",
    )

    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder with a checkpoint; it may still go on.")]
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")]
    step: Annotated[
        int | None,
        typer.Option(parser=natural, metavar="N", help="Of which step, if its checkpoint is kept; else the newest."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Hub name or folder of the base, if it is not where the run had it."),
    ] = None
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="The LoRA adapter as it is, not merged into its base.")
    ] = False
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Of merged weights; else the run's model.dtype."),
    ] = None
    scores: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What gleaner eval --json printed, for the model card.")
    ] = None
    gguf: Annotated[
        bool,
        typer.Option("--gguf", help="A GGUF file beside it, by llama.cpp's converter (on the PATH, or in LLAMA_CPP)."),
    ] = False
    outtype: Annotated[
        Literal["f32", "f16", "bf16", "q8_0", "auto"] | None, typer.Option(help="Of the GGUF file; else q8_0.")
    ] = None
    push_to: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to the hub, once it is verified; private.")
    ] = None
    public: Annotated[bool, typer.Option("--public", help="With --push-to: a new repository is for everybody.")] = False


def run(asked: ExportRequest) -> int:
    """Exit code: as of learner.tools.reported."""
    process.streams_are_commentary()
    from learner.tools.export import command

    return command.run(asked)
