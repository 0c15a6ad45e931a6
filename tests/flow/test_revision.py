"""A whole run on an older commit of a hub's model, which another node or day could repeat: from the cache alone."""

from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from learner.model.adapter_config import read_content
from learner.tools.cli import main
from learner.tools.report.page import model_of
from learner.tools.report.summary import read_run
from rollout import ledger
from tests import hub_cache
from tests.flow.run import Run


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_older_commit_is_sampled_trained_resumed_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = hub_cache.two_commits(tmp_path / "cache", tmp_path)
    hub_cache.use(tmp_path / "cache", monkeypatch)
    run = Run(tmp_path / "work", Path(hub_cache.NAME))
    run.finish("steps=1", "model.revision=old")
    run.finish("steps=2", f"model.revision={commits['old']}")
    assert [line["step"] for line in run.metrics()] == [0, 1, 2]
    assert max(line.get("policy/mismatch_max_current", 0) for line in run.metrics()) < 1e-3
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["model"]["revision"] == commits["old"]
    own, other = (_misses(run, tmp_path / branch) for branch in ("old", "main"))
    assert own < 1e-3 < other
    assert model_of(read_run(run.folder)) == f"{hub_cache.NAME}@{commits['old']}"

    adapter = run.folder / "adapter"
    told = read_content(str(adapter), "adapter")
    assert (told["base_model_name_or_path"], told["revision"]) == (hub_cache.NAME, commits["old"])
    out = tmp_path / "out"
    assert main(["export", str(run.folder), str(out)]) == 0
    merged = AutoPeftModelForCausalLM.from_pretrained(adapter).merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    assert all(torch.allclose(weight, found[name], atol=1e-5) for name, weight in merged.items())
    assert f"| commit of the base | {commits['old']} |" in (out / "README.md").read_text()
    assert (out / "chat_template.jinja").read_text() == (tmp_path / "old" / "chat_template.jinja").read_text()


def _misses(run: Run, model: Path) -> float:
    """The largest difference (nats) between what the first step's tokens were sampled with and the model's own."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    first = ledger.read(ledger.steps(run.folder / "rollouts")[0])
    columns = ("prompt_ids", "completion_ids", "behavior_logprobs")
    found = []
    for prompt, completion, logprobs in zip(*(first.column(name).to_pylist() for name in columns), strict=True):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            own = lm(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        found.append(float((own - torch.tensor(logprobs)).abs().max()))
    return max(found)
