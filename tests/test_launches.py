"""Operations of a step: the rows of the result, one by hand, and a hybrid model counted in both ways."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.common import RESULTS
from benchmarks.learner.launches import CASES, GENERATIONS, GROUPS, KERNELS, KERNELS_BACK, Case, _row, counted

HYBRID = {
    "model_type": "qwen3_5_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
}  # fmt: skip


def test_the_result_has_the_rows_of_the_script() -> None:
    rows = json.loads((RESULTS / "launches.json").read_text())["rows"]
    names = [(case.shape + ", fla" * case.fla, case.base, str(case.checkpointing), str(case.budget)) for case in CASES]
    assert [tuple(row[:4]) for row in rows] == names


def test_a_row_by_hand() -> None:
    """10,000 and 4,000 operations of 5 us beside 0.1 s."""
    case = Case("A", "none", 3, 2048, fla=True)
    counts = [{"operations": n, "GB": 1.2, "TFLOP": 3.4, "seconds": 0.1} for n in (10_000, 4_000)]
    assert _row(case, counts) == [
        "A, fla", "none", "3", "2048", "10,000 -> 4,000", "1 -> 1", "3 -> 3", "0.10 -> 0.10", "0.05 -> 0.02",
        "0.50 -> 0.20",
    ]  # fmt: skip


def test_the_gated_delta_rule_is_counted_by_its_kernel_or_by_functions_of_torch(tmp_path: Path) -> None:
    """Its calls are the learner's: of each micro-batch one for the prompts and one for the completions."""
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    plain, fused = (counted(Case(str(tmp_path), "none", "none", 8192, fla=fla), "h100") for fla in (False, True))
    passes = {"fla forward": KERNELS, "fla backward": KERNELS_BACK}
    calls = {name: fused.launches[name] / launches for name, launches in passes.items()}
    assert set(calls.values()) == {2 * GROUPS}  # a group of 6536 tokens is a micro-batch
    assert not passes.keys() & plain.launches.keys()
    others = fused.launches.total() - sum(fused.launches[name] for name in passes)
    assert GENERATIONS * GROUPS < others < plain.launches.total() / 2
    assert fused.seconds < plain.seconds
