"""What gleaner init writes. The reward function is the README's."""

CONFIG = """\
# A run of gleaner, to be started in this folder:
#   gleaner train --config config.yaml --dry-run     says all that is wrong, and starts nothing
#   gleaner train --config config.yaml               any key can be set behind it: learner.lora.rank=32
# gleaner train --keys lists every key; docs/configuration.md says why one would change it.
name: first-run                  # the run's folder is runs/first-run; each run wants its own
steps: 20                        # optimizer steps; more while eval/accuracy still rises
model:
  path: {model}  # hub name or folder
  dtype: {dtype}
data:
  path: data.jsonl               # or a CSV or Parquet file, or a hub name such as openai/gsm8k
  prompt: question               # the column that the model is asked; all others go to the reward functions
  # system: "Think, then answer in <answer> tags."
  eval: {{size: 1, every: 10}}     # problems that are held out of training; give more rows, and hold out more
rewards:                         # their weighted sum; gleaner rewards list says what is built in
  - {{use: "my_rewards.py:accuracy", weight: 1.0}}
  - {{use: format, weight: 0.2}}   # <reasoning>...</reasoning><answer>...</answer>
rollout:
  num_generations: 8             # completions per problem, which are compared with each other
  max_prompt_length: {prompt}          # tokens
  max_completion_length: {completion}      # tokens
  kv_cache: {kv_cache}
learner:
  learning_rate: {rate}
  groups_per_step: 4             # problems per step
# cluster: {{gpus: {{generator: 0.5, learner: 0.5}}}}     # two slices of one card; without this line: CPU
"""

REWARD = '''\
# my_rewards.py
import re


def accuracy(prompts, completions, answer, **columns):
    """One number per completion; `answer` is a column of the data, repeated once per completion."""
    scores = []
    for completion, gold in zip(completions, answer):
        text = completion[0]["content"]  # a str instead, without a chat template
        found = re.findall(r"-?\\d+", text)
        scores.append(1.0 if found and found[-1] == str(gold) else 0.0)
    return scores
'''

SUMS = {
    "5 + 2 + 3 - 0": 10, "7 + 1 - 4": 4, "9 - 3 + 2 + 6": 14, "4 + 4 + 4": 12,
    "8 - 5 + 1": 4, "2 + 6 + 7 - 3": 12, "1 + 9 - 8": 2, "6 + 3 + 5 - 4": 10,
}  # fmt: skip
ROWS = [
    {"question": f"State the final answer to the following arithmetic problem: {left} =", "answer": str(right)}
    for left, right in SUMS.items()
]
