"""The adapter versions that one engine holds: their files, who still uses them, which may go."""

from __future__ import annotations

import json
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

from cluster.files import digest_of, writing
from rollout.engine import AdapterRefused
from rollout.types import Adapter, Weights
from rollout.weights import header_of

_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"


@dataclass(slots=True)
class Resident:
    """One version on disk.

    keys: names of its tensors; rank: of the adapter, 0 for weights; lora_id: vLLM's integer id, at least 1; users: the
    requests that began with it and still decode.
    """

    version: int
    digest: str
    folder: Path
    keys: frozenset[str]
    rank: int
    lora_id: int
    users: int = 0


class AdapterWindow:
    """Keeps at most `capacity` versions and drops neither the newest nor one that is in use (but see replace).

    Each version has a lora_id of its own, never used twice. With capacity 1 all versions share one id: a newer adapter
    then replaces the one in use, while requests run.

    stage() may run in any thread; everything else belongs to the engine's thread.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._residents: dict[int, Resident] = {}  # oldest first: versions only grow
        self._keys: frozenset[str] | None = None
        self._root = tempfile.TemporaryDirectory(prefix="gleaner-adapters-")

    @property
    def newest(self) -> Resident | None:
        """The version that new requests use; None before the first one."""
        return next(reversed(self._residents.values()), None)

    @property
    def residents(self) -> list[Resident]:
        """Oldest first."""
        return list(self._residents.values())

    def stage(self, adapter: Adapter | Weights) -> Resident:
        """Writes the adapter as PEFT would, in a folder of its own. The digest is that of the bytes read back.

        Whole weights are not written: they are loaded from memory, and no two versions are held.

        Raises AdapterCorrupt, AdapterRefused if the payload is not safetensors, or OSError with the folder in it.
        """
        # A fresh folder each time: vLLM keeps a loaded file mapped, and rewriting it in place kills the process.
        folder = Path(tempfile.mkdtemp(prefix=f"v{adapter.version}-", dir=self._root.name))
        try:
            digest = self._written(adapter, folder)
            keys = _keys_of(adapter)
            rank = 0 if isinstance(adapter, Weights) else int(adapter.config["r"])
        except BaseException:
            rmtree(folder)
            raise
        lora_id = 1 if self._capacity == 1 else adapter.version + 1
        return Resident(adapter.version, digest, folder, keys, rank, lora_id)

    @staticmethod
    def _written(adapter: Adapter | Weights, folder: Path) -> str:
        """The digest of what is in the folder; of weights, of what is in memory."""
        if isinstance(adapter, Weights):
            adapter.verify()
            return adapter.digest
        weights = folder / _WEIGHTS
        with writing(folder):
            weights.write_bytes(adapter.payload)
            (folder / _CONFIG).write_text(json.dumps(adapter.config))
        digest = str(digest_of(weights)["sha256"])
        if digest != adapter.digest:  # else the payload is right, too: one pass over its bytes for both
            adapter.verify()
        return digest

    def check(self, staged: Resident) -> None:
        """Raises AdapterRefused for a version that is not newer, or for modules other than the first adapter's."""
        newest = self.newest
        if newest is not None and staged.version <= newest.version:
            raise AdapterRefused(
                f"adapter v{staged.version} (sha256 {staged.digest[:12]}…): its version must be above "
                f"v{newest.version}, the newest loaded (sha256 {newest.digest[:12]}…); give it a higher one"
            )
        if self._keys is not None and staged.keys != self._keys:
            missing, extra = sorted(self._keys - staged.keys), sorted(staged.keys - self._keys)
            raise AdapterRefused(
                f"adapter v{staged.version}: its tensors must be those of the first adapter, since vLLM silently sets "
                f"absent modules to zero; {len(missing)} missing {missing[:3]}, {len(extra)} unknown {extra[:3]}. "
                "Train the same modules throughout a run, or restart the generators"
            )

    def evictable(self) -> Resident | None:
        """The oldest version that nobody uses and that is not the newest, or None."""
        newest = self.newest
        return next((r for r in self._residents.values() if r.users == 0 and r is not newest), None)

    def is_full(self) -> bool:
        return len(self._residents) >= self._capacity

    def add(self, staged: Resident) -> None:
        self._residents[staged.version] = staged
        self._keys = staged.keys or None  # Weights.unchanged say nothing of those behind them

    def replace(self, staged: Resident) -> None:
        """Makes the staged version the only one, even if requests still use another."""
        for resident in self.residents:
            self.drop(resident)
        self.add(staged)

    def drop(self, resident: Resident) -> None:
        """Forgets the version and deletes its files (a mapped file stays readable until vLLM lets go of it)."""
        self._residents.pop(resident.version, None)
        rmtree(resident.folder)

    def discard(self, staged: Resident) -> None:
        """Deletes the files of a version that was not added."""
        rmtree(staged.folder)

    def clear(self) -> None:
        """Deletes every file. Idempotent."""
        self._residents.clear()
        self._root.cleanup()


def _keys_of(adapter: Adapter | Weights) -> frozenset[str]:
    try:
        return frozenset(header_of(adapter.payload)[0])
    except (struct.error, ValueError, AttributeError) as error:
        raise AdapterRefused(
            f"adapter v{adapter.version}: its payload must be safetensors, got {len(adapter.payload)} bytes starting "
            f"with {bytes(adapter.payload[:8])!r}; build it with safetensors.torch.save"
        ) from error
