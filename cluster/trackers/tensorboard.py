"""TensorBoard."""

from collections.abc import Mapping, Sequence

from cluster.trackers.tracker import Sample, TrackedRun


class TensorBoard:
    """Event files in `tensorboard/` of the run folder. The first of a start says that what earlier ones have of the
    steps to come no longer holds."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary import Writer  # torch's own writer would load torch into this process
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = str(run.folder / "tensorboard")
        begin = run.finished + 1 if run.finished > 0 else 0
        start = EventFileWriter(folder)
        start.add_event(Event(step=begin, session_log=SessionLog(status=SessionLog.START)))
        start.close()
        self._writer = Writer(folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        """This writer has scalars only."""

    def close(self) -> None:
        self._writer.close()
