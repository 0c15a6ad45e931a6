"""Makes docs/losses.md from the tables of learner.algo and the example of a user's own loss.

python -m tests.loss_table        # writes docs/losses.md; tests/test_loss_table.py compares
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import as_table
from learner.algo.advantage import ADVANTAGES, LOSSES
from learner.algo.surrogates import SURROGATES, Surrogate

ROOT = Path(__file__).parents[1]
DOCUMENT, EXAMPLE = ROOT / "docs" / "losses.md", ROOT / "examples" / "my_loss.py"


def surrogate_row(name: str, row: Surrogate) -> list[str]:
    """name, equation, settings with the paper's values, paper."""
    settings = [f"{key} {_shown(value)}" for key, value in row.settings.items()]
    return [name, row.equation, ", ".join(settings), row.paper]


def table() -> str:
    """The content of docs/losses.md."""
    rows = [surrogate_row(name, row) for name, row in SURROGATES.items()]
    return TEXT.format(
        surrogates=as_table(["ratio", "objective of a token", "settings", "paper"], rows),
        kinds=as_table(["kind", "c"], _described(LOSSES)),
        advantages=as_table(["advantage", "A"], _described(ADVANTAGES)),
        example=EXAMPLE.read_text().rstrip(),
    )


def _shown(value: object) -> str:
    return f"[{', '.join(f'{part:g}' for part in value)}]" if isinstance(value, tuple) else f"{value:g}"


def _described(functions: Mapping[str, Callable[..., Any]]) -> list[list[str]]:
    """name and first paragraph of the docstring of each."""
    texts = {name: inspect.getdoc(function) or "" for name, function in functions.items()}
    return [[name, " ".join(text.partition("\n\n")[0].split())] for name, text in texts.items()]


TEXT = """# Losses

Made by `python -m tests.loss_table` from the tables in `learner/algo/`; `tests/test_loss_table.py` compares it with
what the code says now.

The loss of an optimizer batch is, over its trained tokens,

    sum of  c * ( -objective + beta * KL )

`learner.loss.ratio` chooses the objective, `.kind` the coefficient c, `.advantage` the advantage A in the objective,
and `.beta` weighs the KL to the reference. π is the policy being trained and μ the sampler (with several updates per
batch the policy that the batch began with), r = π / μ of the token, s the product of r over its completion, g their
geometric mean, and sg the stop-gradient.

## learner.loss.ratio

{surrogates}

Values are those of the papers; `learner.loss.bounds={{cap: 3}}` replaces them (`cap`, `band`, `epsilon`, ...), and
one that the objective does not have is refused. An objective with sg is reported, in `loss/total`, without its log π.
`policy/clip_fraction` is the share of trained tokens whose ratio is out of a bound, `policy/masked_fraction` of those
that lost all of their gradient (tokens of advantage 0, which are trained with beta > 0 or a loss of your own alone,
have none to lose).

## learner.loss.kind

T is the number of trained tokens of a completion.

{kinds}

## learner.loss.advantage

{advantages}

std is a sample's, divided by n - 1 (`reward/std` is divided by n), and eps is 1e-4. A group whose rewards are all
equal, or of which fewer than two are known, has advantage 0. PPO's are in [ppo.md](ppo.md).

## learner.loss.top_entropy

Below 1 the objective is of that share of the batch's trained tokens alone before which the policy that the batch begins
with had the highest entropies (Wang et al. 2506.01939, section 5: 0.2); coefficients and the KL stay those of all
tokens. The entropies take one more forward pass of the batch, and the gradient depends neither on micro-batches nor on
ranks. Completions without an advantage, since their group has no difference, have no part in the share.

## learner.loss.beta

The KL of a token, with d = ref - log π and w = π / sampler (also with several updates per batch), where ref is the
reference's logprob:

| | | |
| --- | --- | --- |
| value | exp(d) - d - 1 | k3: Schulman 2020, Approximating KL Divergence; DeepSeekMath 2402.03300, equation 4 |
| gradient | min(w, 2) (log π - ref) ∇ log π | of w k3, w not held constant: DeepSeek-V3.2 2512.02556, equation 7 |

The gradient is the KL's own and corrected for the sampler, but for the cap of 2 (Yao et al. 2025). It is not that of
the value: (1 - exp(d)) ∇ log π, which TRL's GRPO takes without `use_bias_correction_kl`, is in expectation the gradient
of KL(reference || π), and unbounded where the reference finds a token far likelier. `policy/kl` is the mean of the
value over the trained tokens; in `loss/total` it counts beta c times (`learner/algo/loss.py`, `kl_to_reference`).

## learner.algorithm: distill

On-policy distillation (Agarwal et al. 2306.13649, with the reverse KL; MiniLLM, Gu et al. 2306.08543): the policy's own
completions, and of the loss above the KL alone, with `model.reference` as the teacher. So each token has the advantage
log teacher - log π, and the gradient over all tokens of a vocabulary is that of KL(π || teacher)
(`tests/learner/algo/test_loss.py`). `policy/kl` says how far the policy still is; rewards are measured and teach
nothing; a completion without one is trained on, too.

```bash
make demo                                                         # the teacher: runs/demo-seed0/adapter
make demo ARGS="name=student learner.algorithm=distill learner.loss.beta=1 model.reference=runs/demo-seed0/adapter"
```

Every token has a gradient, and none is divided by a standard deviation, so begin with a lower rate than with GRPO:
SmolLM2 with the task of `make demo-real` and a teacher at 0.85 went in 20 steps from 0.158 to 0.417 at 5e-5, one policy
version ahead; at GRPO's 2e-4 it moved so far within a step that `guard.mismatch_k3` ended the run (one run each).

The teacher is an adapter of the same base, as any reference: no second model, one forward pass more
(`learner.mode: full`: a whole model). With `grpo` and `beta` above 0 the same teacher counts beside the rewards.
`python -m benchmarks distill` compares it with GRPO.

### A larger model: model.teacher

```bash
gleaner export runs/demo-seed0 out/teacher                        # here the demo's own policy, as a model of its own
make demo ARGS="name=student learner.algorithm=distill learner.loss.beta=1 learner.learning_rate=3e-4 \\
    model.teacher=out/teacher learner.loss.teacher_top=8"
```

A model of another size, a folder or a hub name, in a process of its own (`teacher-0`): vLLM computes prompt and
completion in one pass (`prompt_logprobs`), while reward functions score the group. What it says is recorded with the
group, so that a replay needs no teacher; evaluations do not ask it. With `learner.algorithm: grpo` it counts beside the
rewards, as a reference does. The demo's adapter, merged into a model of its own, teaches as it does as an adapter: 0.85
in 15 steps at 1e-4, seeds 0 to 2 (`python -m benchmarks distill_model`).

- Its tokenizer must be the policy's: each id that the policy may sample must stand for the same text. Else the run is
  refused before anything starts, with the first id that differs. It may have tokens and rows of its head more.
- It may be stored as anything that vLLM reads, AWQ, GPTQ or FP8 too, and is computed in `model.dtype`. Its context must
  be above `rollout.max_prompt_length + max_completion_length`: vLLM samples one token behind them.
- `cluster.gpus.teacher`: a card, several over which it is spread, or a slice of the card of other roles. The memory
  plan says what it takes and leaves the others the rest. A step of its engine has so many tokens that their logits in
  float32 take 1 GiB, 4096 at most.
- It reads prompts as the policy's chat template writes them; that its own is another is told before the start.
- The process is replaced if it ends or hangs, and gets the groups again that it had. Another teacher is refused at a
  resume, unless `resume_allow_changed=[base]`.
- The prompt is computed again for each completion: vLLM reads no cached prefix where a prompt's logprobs are asked for.
- Not with `env.use`, `data.teacher` or `model.reference`, `learner.algorithm: ppo`, a temperature other than 1, or in a
  sweep.

### A privileged prompt: data.teacher

The teacher may be given another prompt than the policy: the answer, worked examples, a hint or a system prompt, made of
the same row. Then it needs no weights of its own: without `model.reference` it is what training began as (the base, or
`model.adapter`), and the policy learns to do without the prompt what the model does with it (context distillation:
Askell et al. 2112.00861; Snell et al. 2209.15189; here on the policy's own samples).

```bash
make demo-real ARGS="name=self learner.algorithm=distill learner.loss.beta=1 learner.learning_rate=1e-4 \\
    data.teacher.prompt=shown"                          # two worked examples, then the question: examples/constraints
```

```yaml
data: {{path: train.jsonl, prompt: question, teacher: {{prompt: "{{question}} (The answer is {{answer}}.)"}}}}
learner: {{algorithm: distill, loss: {{beta: 1}}}}
```

- `data.teacher.prompt` is a column or a template over columns, as `data.prompt`, and `data.teacher.system` a system
  message; both are rendered by the same chat template. `data.teacher.max_prompt_length` bounds them before the start;
  `data.overlong` says what becomes of longer ones; a row without one is left out.
- A completion's tokens follow the teacher's prompt as they followed the policy's. The prompt is recorded with the group
  (`teacher_prompt_ids` in the ledger), so that replay needs neither data nor template; evaluations never read it.
- The pass that scores it has micro-batches of its own, forward alone, with at most `learner.token_budget` tokens each
  and each prompt once a group; the memory plan and the rehearsal on a card count the longer prompts.
- It teaches style, too: what the examples look like, and their length. Mind that a teacher which was given the answer
  says that it knows it.
- Not with `env.use`: an environment adds its messages to the policy's prompt alone.

SmolLM2-135M-Instruct keeps 0.517 of the held-out constraints of `make demo-real` behind two worked examples and 0.158
without. Taught so, with no reward, it kept 0.342 and 0.408 without them after 60 steps at 1e-4 (two runs of a seed;
0.125 and 0.158 after 30; `python -m benchmarks self_distillation`), and 0.308 after 40 steps at 5e-5 (one run). Rewards
teach this task faster: a teacher says something only of tokens that the policy samples, and it hardly ever writes a
title or P.S.

### Over the likeliest tokens: learner.loss.teacher_top

With `model.teacher` the KL need not be guessed from the one token that was sampled. With `teacher_top: k` (at most 20)
the teacher also gives its k likeliest tokens at each place, and the KL is taken exactly over these and all others as
one: with p_i = π(i), q_i = teacher(i) and the rests p = 1 - Σ p_i and q = 1 - Σ q_i

    KL = Σ p_i log(p_i / q_i) + p log(p / q),   its derivative by log p_i: p_i (log(p_i / q_i) - log(p / q))

- It is at most the KL over the whole vocabulary (data processing inequality), and equal to it where all else is alike.
- It needs no ratio to the sampler, and has none: it is of the distribution, not of a sample. A stale sampler only
  changes which prefixes are looked at, which nothing corrects (as in GKD, Agarwal et al. 2306.13649).
- Rests below 2^-23, which float32 cannot tell from rounding, count as 2^-23.
- It costs no second model and no [tokens, vocabulary] tensor: the logits of the k tokens are picked from the tiles of
  the head (`learner/model/logprob.py`). With LoRA one more state a token is kept.
- `policy/kl` stays the estimate from the sampled tokens, of the whole KL; `loss/total` counts the one above.
  `policy/teacher_top_mass` and `policy/top_mass` say how much of both distributions the k tokens hold: with little of
  either raise k.

## A loss of your own

A function in a file of yours, named by `learner.loss.ratio=my_loss.py:topr` (or `package.module:function`):

```python
{example}
```

- It is given the N completion tokens of a micro-batch (`learner/algo/loss.py` lists what is known of them) and
  returns two tensors [N]: the objective, and whether a bound has changed it. Autograd differentiates the objective by
  `tokens.logprobs` alone, and the model's backward pass starts from there: time and memory do not grow with it.
- Tokens of advantage 0 are among them, of groups without signal too: a term that does not depend on A reaches them.
- `tokens.weighted(w)` is w A, with the gradient w A d log π; `tokens.over_completions("sum" | "mean")` are the same
  tokens with s or g in place of r.
- Parameters after the first are `learner.loss.bounds`: `cap`, `band`, `epsilon` and `delta`, with the function's own
  defaults.
- It is tried on six tokens before anything starts: an exception, a wrong shape, no gradient, infinity and NaN are
  refused in one line. Completions come whole, but with which others is not fixed: what is returned for one must not
  depend on the others, or the gradient depends on how the batch was split into micro-batches.
- It runs in the learner's process, with its rights and its environment. A checkpoint remembers the content of the file,
  and a run goes on from it only with the same (`resume_allow_changed: [loss]` to change it on purpose).
- `learner.updates_per_batch` stays 1: holding the policy near the one that a batch began with is worked out for `clip`.

One that is to stay is a function and a row in `learner/algo/surrogates.py`, and nothing else: the configuration, --help
and this page are made from that table.
"""


if __name__ == "__main__":
    DOCUMENT.write_text(table())
