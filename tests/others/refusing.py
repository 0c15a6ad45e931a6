"""A user's file with a factory's setting that TRL refuses."""

from trl.rewards import get_repetition_penalty_reward

repetition = get_repetition_penalty_reward(max_penalty=0.5)
