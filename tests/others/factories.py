"""A user's file: TRL's factories are called in it, one line each."""

from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment

overlong = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
repetition = get_repetition_penalty_reward(ngram_size=2, max_penalty=-0.5)
trigrams = get_repetition_penalty_reward()
cosine = get_cosine_scaled_reward(max_len=10)
bounded = get_cosine_scaled_reward(5, -2.0, -1.0, 1.0, 2.0)
