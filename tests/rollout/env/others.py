"""What users of SkyRL-Gym and OpenEnv write. Loaded by its file."""

from typing import Any


class Adding:
    """Of the signature of skyrl_gym.envs.base_text_env.BaseTextEnv: asks until the sum is right."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        self.goal, self.turns = (extras or {})["answer"], 0
        self.hint, self.most = (env_config or {}).get("hint", "No."), (extras or {})["max_turns"]

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [{"role": "system", "content": "Add."}, *prompt], {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        done = action == self.goal
        answer = {
            "observations": []
            if done
            else [{"role": "user", "content": f"{self.hint} {self.most - self.turns} left."}],
            "reward": 1.0 if done else -0.1,
            "done": done,
            "metadata": {},
        }
        return answer | {"postprocessed_action": "5"} if action == "change" else answer

    def get_metrics(self) -> dict[str, Any]:
        return {"tries": self.turns, "who": "adding"}

    def close(self) -> None: ...


def action(text: str) -> dict[str, str]:
    return {"message": text}


def observe(observation: dict[str, Any]) -> str:
    return f"It says {observation['echoed']}."
