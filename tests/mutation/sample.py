"""Names of mutants, drawn at random: what `make mutants` runs of the many thousands, one name a line.

    PYTHONPATH=build/mutants .venv/bin/python tests/mutation/sample.py NUMBER SEED

All of them take a night; of 400 the share that is killed is known within 3 %, and two seeds draw different ones.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

from mutmut.configuration import config
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.utils.format_utils import get_mutant_name

# Code that the tests of pyproject.toml's list cannot reach, so that its mutants would say nothing: it is tested by
# tests/learner/ranks in several processes, by a CUDA card, or by vLLM itself (tests/flow).
ELSEWHERE = re.compile(
    r"learner\.trainer\.state\.x(_weights_of|_set_weights|ǁDividedStateǁ|__(states|in_blocks|in_files|file_of|first|reason|load)__)"
    r"|learner\.trainer\.trainer\.x(ǁDividedNormǁ|__norm__|ǁSenderǁempty|ǁTrainerǁ(attach_base|empty_weights))"
    r"|rollout\.weights\.xǁ_Mappingǁ_register|rollout\.worker\.x_vllm_engine"
)


def main(number: int, seed: int) -> None:
    names = []
    for file in map(Path, config().only_mutate):
        names += [get_mutant_name(file, one) for one in mutate_file_contents(str(file), file.read_text()).mutant_names]
    names = [name for name in names if not ELSEWHERE.search(name)]
    print("\n".join(random.Random(seed).sample(sorted(names), min(number, len(names)))))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
