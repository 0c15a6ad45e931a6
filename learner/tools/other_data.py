"""--data names other problems than a configuration does, which says nothing of how to read them."""

import json

from rollout.config import OF_ITS_PATH, DataConfig


def of_other_data() -> list[str]:
    """Settings that undo what the configuration says of its own data; those that the user gives come after them."""
    defaults = {name: DataConfig.model_fields[name].get_default(call_default_factory=True) for name in OF_ITS_PATH}
    return [f"data.{name}={json.dumps(default)}" for name, default in defaults.items()]
