"""A tracker in a thread of its own: one that is slow, down, or wants a login costs the run one line, and no time."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

from cluster.trackers.tracker import Sample, TrackedRun, Tracker

CLOSE_S = 60.0  # for what a tracker still has to send

log = logging.getLogger(__name__)


class Background:
    """Takes what a tracker is to be told, and returns at once. name: as in the configuration."""

    def __init__(self, name: str, make: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        self._name = name
        self._inbox: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        # Daemon: a tracker that never returns does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(make, run), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._inbox.put(lambda tracker: tracker.log(step, values))

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        self._inbox.put(lambda tracker: tracker.completions(step, samples))

    def close(self) -> None:
        """Waits for what is still to be sent, for a minute at most."""
        self._inbox.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning(
                "trackers: %s has not taken all metrics %.0f s after the last step and is left behind; "
                "metrics.jsonl has them all", self._name, CLOSE_S,
            )  # fmt: skip

    def _run(self, make: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        try:
            tracker = make(run)
            while (told := self._inbox.get()) is not None:
                told(tracker)
            tracker.close()
        except Exception as error:  # whatever a library of others raises, the run is not about it
            text = " ".join(str(error).split())[:300]
            log.warning(
                "trackers: %s failed (%s: %s); the run goes on without it, metrics.jsonl has all metrics",
                self._name, type(error).__name__, text,
            )  # fmt: skip
