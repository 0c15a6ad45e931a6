"""In place of learner.api.child: says what it is told to, or writes a line of metrics each 50 ms until it is asked to
stop, and then one more, as a run that finishes its step."""

import json
import signal
import sys
import time
from pathlib import Path

import yaml

asked: list[int] = []


def main() -> int:
    config = yaml.safe_load(sys.stdin)
    steps = config["steps"]
    if steps < 10:  # told to end so
        for line in config["data"]["system"].splitlines():
            print(line, flush=True)
            time.sleep(0.3)  # so that a caller reads it alone
        return int(steps)
    signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    file = Path(config["output_dir"], "run", "metrics.jsonl")
    with file.open("a", buffering=1) as stream:
        for step in range(1, steps):
            stream.write(json.dumps({"step": step, "at": time.time()}) + "\n")
            time.sleep(0.05)
            if asked:
                break
        stream.write(json.dumps({"step": step + 1, "at": time.time()}) + "\n")
    time.sleep(0.5)  # two looks at the file, at which a caller could ask again
    print(f"asked {len(asked)} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
