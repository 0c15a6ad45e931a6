"""How much memory a piece of code takes: torch's own CPU allocations, temporaries inside of kernels included."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes held at once by what `work` allocates; what was there before does not count.

    From the allocator's events (kineto, [memory]), hence exact and the same in every run, unlike the resident set. Of
    the calling thread only, so `work` must not hand the work to another one.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        work()
    assert run.profiler is not None
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "nothing was allocated in this thread"
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
