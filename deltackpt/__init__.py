"""deltackpt: publish and follow model weights as XOR-delta checkpoints.

`import deltackpt` imports no torch, no CUDA and no storage client. Every name is imported when it is first
used, so that the command line starts quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltackpt.anchor import make_anchor
    from deltackpt.board import Group, StoreBoard, serve_tcp
    from deltackpt.errors import (
        AlreadyExists,
        Busy,
        ChainError,
        ConfigError,
        DeltaError,
        Fenced,
        FormatError,
        IntegrityError,
        NotFound,
        Poisoned,
        RankFailed,
        SignatureError,
        StoreError,
        Unavailable,
        UnsupportedFormat,
    )
    from deltackpt.folder import CheckpointTarget
    from deltackpt.follow import Follower, Prepared, weight_version
    from deltackpt.holding import Slice
    from deltackpt.manifest import Manifest
    from deltackpt.mirror import Mirror, mirror_store
    from deltackpt.planned import PlannedTarget
    from deltackpt.prune import prune_store
    from deltackpt.publish import Pending, Publisher, publish_folder
    from deltackpt.replica import Replica
    from deltackpt.scatter import cached_plan, make_plan
    from deltackpt.slices import SliceTarget
    from deltackpt.store import open_store
    from deltackpt.tensors import TensorTarget
    from deltackpt.verify import verify_folder, verify_store
    from deltackpt.watch import Watcher

__all__ = [
    "AlreadyExists",
    "Busy",
    "ChainError",
    "CheckpointTarget",
    "ConfigError",
    "DeltaError",
    "Fenced",
    "Follower",
    "FormatError",
    "Group",
    "IntegrityError",
    "Manifest",
    "Mirror",
    "NotFound",
    "Pending",
    "PlannedTarget",
    "Poisoned",
    "Prepared",
    "Publisher",
    "RankFailed",
    "Replica",
    "SignatureError",
    "Slice",
    "SliceTarget",
    "StoreBoard",
    "StoreError",
    "TensorTarget",
    "Unavailable",
    "UnsupportedFormat",
    "Watcher",
    "cached_plan",
    "make_anchor",
    "make_plan",
    "mirror_store",
    "open_store",
    "prune_store",
    "publish_folder",
    "serve_tcp",
    "verify_folder",
    "verify_store",
    "weight_version",
]

_MODULES = {
    "CheckpointTarget": "folder",
    "Follower": "follow",
    "Group": "board",
    "Manifest": "manifest",
    "Mirror": "mirror",
    "Pending": "publish",
    "PlannedTarget": "planned",
    "Prepared": "follow",
    "Publisher": "publish",
    "Replica": "replica",
    "Slice": "holding",
    "SliceTarget": "slices",
    "StoreBoard": "board",
    "TensorTarget": "tensors",
    "Watcher": "watch",
    "cached_plan": "scatter",
    "make_anchor": "anchor",
    "make_plan": "scatter",
    "mirror_store": "mirror",
    "open_store": "store",
    "prune_store": "prune",
    "publish_folder": "publish",
    "serve_tcp": "board",
    "verify_folder": "verify",
    "verify_store": "verify",
    "weight_version": "follow",
}
"""Where a name of `__all__` lives, if not in `errors`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
