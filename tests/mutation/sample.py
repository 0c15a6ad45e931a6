"""Names of mutants, drawn at random: what `make mutants` runs of the many thousands, one name a line.

    PYTHONPATH=build/mutants .venv/bin/python tests/mutation/sample.py NUMBER SEED

All of them take a night; of 400 the share that is killed is known within 3 %, and two seeds draw different ones.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from mutmut.configuration import config
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.utils.format_utils import get_mutant_name


def main(number: int, seed: int) -> None:
    names = []
    for file in map(Path, config().only_mutate):
        names += [get_mutant_name(file, one) for one in mutate_file_contents(str(file), file.read_text()).mutant_names]
    print("\n".join(random.Random(seed).sample(sorted(names), min(number, len(names)))))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
