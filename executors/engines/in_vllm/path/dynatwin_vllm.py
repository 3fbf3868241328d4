"""The door by which vLLM finds our KV tiers: its `spec_module_path`. Only this folder is on its PYTHONPATH.

Our rooms are found beside this file, and nothing else of the environment that dynatwin is installed in: an engine's
packages are its own. Where it has no xxhash, names of blocks are made by what Python has: nobody outside sees them.
"""

from __future__ import annotations

import importlib.util
import sys
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

_TOP = Path(__file__).resolve().parents[4]


def _open(room: str) -> None:
    """Make a room importable by its name."""
    folder = _TOP / room
    spec = importlib.util.spec_from_file_location(
        room, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"dynatwin: there is no {folder}")
    sys.modules[room] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _hashes() -> ModuleType:
    """As much of xxhash as the policies of tiers ask for."""
    made = ModuleType("xxhash")

    def intdigest(text: bytes, seed: int = 0) -> int:
        return int.from_bytes(blake2b(text, digest_size=8, salt=seed.to_bytes(8)).digest())

    made.xxh3_64_intdigest = intdigest  # type: ignore[attr-defined]
    return made


for _room in ("policies", "executors"):
    if _room not in sys.modules:
        _open(_room)
_lacks_xxhash = importlib.util.find_spec("xxhash") is None
if _lacks_xxhash:
    sys.modules["xxhash"] = _hashes()

from executors.engines.in_vllm.disk import DiskTier  # noqa: E402
from executors.engines.in_vllm.specs import HostSpec, TierSpec  # noqa: E402

if _lacks_xxhash:
    del sys.modules["xxhash"]  # others may look for the whole of it

__all__ = ["DiskTier", "HostSpec", "TierSpec"]
