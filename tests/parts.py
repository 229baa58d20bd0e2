"""Streams in parts: versions of the tensors of a layout, published whole or by the parts of a partition."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from strategies import Memory, elements_of

from deltackpt.anchor import Weights, full_draft
from deltackpt.backend import encode, encode_part
from deltackpt.checkpoint import default_placement
from deltackpt.digest import state_fingerprint
from deltackpt.layout import Layout
from deltackpt.manifest import Manifest, data_prefix
from deltackpt.partition import Partition
from deltackpt.shard import EncodedGroup
from deltackpt.store import open_store
from deltackpt.writer import Draft, Writer, attempt


class Ranks:
    """The boxes of every part as separate contiguous memory, as ranks hold them."""

    def __init__(self, partition: Partition, contents: Sequence[bytes]) -> None:
        layout = partition.layout
        self.memory = []
        for p in range(partition.parts):
            boxes = []
            for t, box in partition.places(p):
                flat = np.frombuffer(contents[t], f"<u{layout.width[t]}")
                boxes.append(flat[elements_of(layout, t, box)].tobytes())
            self.memory.append(Memory(boxes, skew=1))


def encode_parts(
    partition: Partition, old: Sequence[bytes], new: Sequence[bytes], **options: object
) -> list[list[EncodedGroup]]:
    """Encode each part from the memory of its rank."""
    before, after = Ranks(partition, old), Ranks(partition, new)
    return [
        list(encode_part(partition, p, before.memory[p].addresses, after.memory[p].addresses, **options))  # type: ignore[arg-type]  # by name
        for p in range(partition.parts)
    ]


class Stream:
    """A store whose versions a test knows. contents: the bytes of every tensor in each version."""

    def __init__(self, root: Path, layout: Layout, first: Sequence[bytes]) -> None:
        self.url, self.layout, self.contents = str(root), layout, [list(first)]
        self.writer = Writer(open_store(self.url), run_id="test")
        memory = Memory(first)
        with attempt(self.writer) as upload:
            weights = Weights(layout, default_placement(layout), (), memory.addresses)
            self.writer.commit(full_draft(self.writer, upload, weights))

    def publish(self, new: Sequence[bytes], partition: Partition | None = None, *, together: bool = False) -> Manifest:
        """Commit the next version; each part has shards in a folder of its own, unless all go into one together."""
        old, head = self.contents[-1], self.writer.head
        assert head is not None
        if partition is None:
            before, after = Memory(old), Memory(new)
            parts = [list(encode(self.layout, before.addresses, after.addresses))]
        else:
            parts = encode_parts(partition, old, new)
        if together:
            parts = [[group for part in parts for group in part]]
        groups = [group for part in parts for group in part]
        change = np.zeros(len(self.layout.names), np.uint64)
        for group in groups:
            np.add.at(change, group.tensor, group.fingerprint)
        tiling = partition or self.layout
        state = int(head.manifest.state, 16) + state_fingerprint(self.layout.weights, change)
        with attempt(self.writer) as upload:
            with upload.parallel():
                for part in parts:
                    if part:
                        upload.prefix = data_prefix(head.manifest.version + 1, secrets.token_hex(8))
                        upload.put(part)
            draft = Draft(
                "delta" if groups else "empty", self.layout, default_placement(self.layout), (), state,
                head.manifest.version, upload.shards, frozenset(g.group for g in groups),
                sum(g.changed for g in groups), sum(g.changed * tiling.groups[g.group].width for g in groups),
                partition=partition if groups else None,
            )  # fmt: skip
            self.contents.append(list(new))
            return self.writer.commit(draft)
