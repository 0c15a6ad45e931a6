"""The command line of GPU benchmarks that make a random model: the same options, and what a row's process is given."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.rows import folder_for

TOKENIZER = Path(__file__).parents[2] / "examples" / "tiny-gsm8k"


def options_of(description: str | None, minutes: float, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """As `parsed`, and `folder` is settled, for which a card must be there or --device cpu said."""
    return settled(parsed(description, minutes, arguments))


def parsed(description: str | None, minutes: float, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Of these arguments, or of the process's own. minutes: the default of --minutes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of 0.3M weights, to rehearse")
    parser.add_argument("--minutes", type=float, default=minutes, help="no row is begun later, and none goes on")
    parser.add_argument("--tokenizer", default=str(TOKENIZER), help="folder of a tokenizer")
    parser.add_argument("--models", default="build/models", help="where the random models are made")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names begin so")
    parser.add_argument("--folder", type=Path, help="of the results, to go on with those of another day")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def settled(options: argparse.Namespace) -> argparse.Namespace:
    options.folder = (options.folder or folder_for(options.device, options.tiny)).absolute()
    return options


def passed_on(options: argparse.Namespace) -> list[str]:
    """To the process of a row."""
    told = ["--device", options.device, "--folder", str(options.folder), "--tokenizer", options.tokenizer]
    return [*told, "--models", options.models, *(["--tiny"] if options.tiny else [])]
