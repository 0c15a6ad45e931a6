"""What ends an export."""


class ExportError(ValueError):
    """Something given is wrong, found before anything is written; one sentence."""


class ExportFailed(RuntimeError):
    """It failed on the way, and what was not verified is gone; one sentence."""
