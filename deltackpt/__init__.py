"""deltackpt: publish and follow model weights as XOR-delta checkpoints.

`import deltackpt` imports no torch, no CUDA and no storage client.
"""

from deltackpt.anchor import make_anchor
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
    SignatureError,
    StoreError,
    Unavailable,
    UnsupportedFormat,
)
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower, Prepared
from deltackpt.manifest import Manifest
from deltackpt.publish import Publisher, publish_folder
from deltackpt.store import open_store
from deltackpt.tensors import TensorTarget

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
    "IntegrityError",
    "Manifest",
    "NotFound",
    "Poisoned",
    "Prepared",
    "Publisher",
    "SignatureError",
    "StoreError",
    "TensorTarget",
    "Unavailable",
    "UnsupportedFormat",
    "make_anchor",
    "open_store",
    "publish_folder",
]
