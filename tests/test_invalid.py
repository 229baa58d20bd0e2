"""Hostile files: each breaks one rule of `manifests/FORMAT.md` and must meet the error class in its name.

A file is `<rule>.<error class>.<ending>`, a folder `<rule>.<error class>` is a store. The word before the first
hyphen says which decoder gets it. The text in RULES is part of the message: a file that fails for another reason proves
nothing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from deltackpt import backend, errors
from deltackpt.layout import Layout
from deltackpt.manifest import Shard, decode_anchor, decode_manifest, decode_placement
from deltackpt.partition import Partition
from deltackpt.reader import Reader
from deltackpt.shard import Fetched, header_length, parse_header, parse_index
from deltackpt.store import LocalStore

INVALID = Path(__file__).parent.parent / "manifests" / "invalid"


def read_header(path: Path) -> None:
    data = path.read_bytes()
    length = header_length(data[:64], len(data), "file")
    header = parse_header(data[8 : 8 + length], len(data), "file")
    Layout([t.name for t in header.tensors], [t.dtype for t in header.tensors], [t.shape for t in header.tensors])


def read_shard(path: Path) -> None:
    """Decode a shard of the layout of FORMAT.md section 10; its `__metadata__` has what a manifest would say."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    said = json.loads(data[8 : 8 + length])["__metadata__"]
    (begin, middle), (start, end) = (map(int, said[k].split("-")) for k in ("frames", "tensors"))
    tiling: Layout | Partition = LAYOUT
    if path.name.startswith("parts-"):
        tiling = Partition(LAYOUT, [[(0, None), (1, ((0, 2),))], [(1, ((2, 6),))]])
    shard = Shard("data/hostile", len(data), xxhash.xxh3_128_hexdigest(data), (begin, middle), (start, end))
    fetched = Fetched(shard, parse_index(shard, memoryview(data), tiling), memoryview(data))
    Reader(LocalStore(INVALID)).check_frames(fetched)
    for group in sorted(set(fetched.index.frames["group"].tolist())):
        backend.decode_group(tiling, group, fetched.frames(group))


def read_store(path: Path) -> None:
    reader = Reader(LocalStore(path))
    reader.load()
    for version, entry in reader.history.items():
        if entry.manifest.kind == "delta":
            list(reader.delta(version).staged())


def read_manifest(path: Path) -> None:
    decode_manifest(path.read_bytes(), 1)


LAYOUT = Layout(["a", "b"], ["BF16", "BF16"], [[6], [6]])
"""That of FORMAT.md section 10."""

DECODERS: dict[str, Callable[[Path], object]] = {
    "manifest": read_manifest,
    "side": read_manifest,
    "layout": lambda path: Layout.decode(path.read_bytes()),
    "partition": lambda path: Partition.decode(path.read_bytes(), LAYOUT),
    "placement": lambda path: decode_placement(path.read_bytes(), 2),
    "anchor": lambda path: decode_anchor(path.read_bytes(), 1, 2),
    "header": read_header,
    "chain": read_store,
    "store": read_store,
}
SHARDS = ("shard", "parts", "frame", "plane", "counts", "position", "mask", "zstd", "deflate", "lz4", "snappy", "outer")
DECODERS |= dict.fromkeys(SHARDS, read_shard)

RULES = {
    "anchor-file-climbs-out.FormatError.json": "is not a plain name inside the folder",
    "anchor-fingerprints-short.FormatError.json": "8 bytes of fingerprints for 2 tensors",
    "anchor-folder-climbs-out.FormatError.json": "is not a plain key inside the store",
    "anchor-level-above.UnsupportedFormat.json": "format level 2",
    "anchor-nbytes-negative.FormatError.json": "$.files[0].nbytes",
    "anchor-version-differs.FormatError.json": "it says version 2",
    "chain-empty-changes-state.FormatError": "state",
    "chain-epoch-falls.FormatError": "has epoch 1, version 1 already had 2",
    "chain-gap.ChainError": "manifest of version 1 is missing",
    "chain-layout-changes.FormatError": "changes lineage or layout",
    "chain-lineage-changes.FormatError": "changes lineage or layout",
    "chain-of-another-store.FormatError": "belongs to store other",
    "chain-prev-wrong.ChainError": "the stream was forked or edited",
    "chain-rewind-across-layouts.FormatError": "layout",
    "chain-rewind-to-other-state.FormatError": "state",
    "chain-starts-late.ChainError": "manifest of version 0 is missing",
    "counts-above-planes.FormatError.safetensors": "the counts demand 2",
    "counts-above-tile.FormatError.safetensors": "tile 0 has 6 elements and counts 7 changes",
    "counts-all-zero.FormatError.safetensors": "it holds no change",
    "counts-for-more-tiles.FormatError.safetensors": "plane 0: frames hold 6 bytes, the counts demand 4",
    "counts-missing.FormatError.safetensors": "plane 0: frames hold 0 bytes, the counts demand 4",
    "deflate-bytes-after-end.FormatError.safetensors": "or bytes follow it",
    "deflate-cut-short.FormatError.safetensors": "deflate frame does not end",
    "deflate-longer-than-due.FormatError.safetensors": "does not end after 6 bytes",
    "frame-ans.UnsupportedFormat.safetensors": "frame is ans",
    "frame-checksum-differs.IntegrityError.safetensors": "checksum of a frame of group 0 differs",
    "frame-codec-unknown.FormatError.safetensors": "codec number 6 is unknown",
    "frame-outer-codec-unknown.FormatError.safetensors": "outer codec number 2 is unknown",
    "frame-raw-longer-than-due.FormatError.safetensors": "raw frame holds 7 bytes, 6 are due",
    "header-bytes-after-end.FormatError.safetensors": "the tensors end at byte",
    "header-cut-short.FormatError.safetensors": "5 bytes found",
    "header-data-cut-short.FormatError.safetensors": "the tensors end at byte",
    "header-dtype-unknown.FormatError.safetensors": "dtype 'I4' is unknown",
    "header-duplicate-field.FormatError.safetensors": "shape is there twice",
    "header-duplicate.FormatError.safetensors": "a is there twice",
    "header-field-unknown.FormatError.safetensors": "order",
    "header-git-lfs-pointer.FormatError.safetensors": "git-lfs pointer",
    "header-hole-at-start.FormatError.safetensors": "tensor a begins at 4 and leaves a hole",
    "header-hole.FormatError.safetensors": "tensor b begins at 8 and leaves a hole",
    "header-html-page.FormatError.safetensors": "HTML page",
    "header-length-above-limit.FormatError.safetensors": "above the limit of 100000000",
    "header-longer-than-file.FormatError.safetensors": "header length 4096, but the file has only",
    "header-metadata-not-strings.FormatError.safetensors": "`str`",
    "header-name-lone-surrogate.FormatError.safetensors": "surrogate",
    "header-nested-deep.FormatError.safetensors": "header",
    "header-not-json.FormatError.safetensors": "JSON",
    "header-not-object.FormatError.safetensors": "brace",
    "header-not-utf8.FormatError.safetensors": "UTF-8",
    "header-offsets-backwards.FormatError.safetensors": "needs 0 bytes, data_offsets [4, 0] hold -4",
    "header-offsets-differ-from-shape.FormatError.safetensors": "needs 8 bytes, data_offsets [0, 4] hold 4",
    "header-overlap.FormatError.safetensors": "tensor b begins at 2 and overlaps",
    "header-shape-bits-ragged.FormatError.safetensors": "is 12 bits, not whole bytes",
    "header-shape-float.FormatError.safetensors": "`float`",
    "header-shape-negative.FormatError.safetensors": "`int` >= 0",
    "header-shape-overflows.FormatError.safetensors": "needs more than 2^45 bytes",
    "layout-bits-ragged.FormatError.json": "is 18 bits, not whole bytes",
    "layout-dtype-unknown.FormatError.json": "dtype 'F12' is unknown",
    "layout-duplicate.FormatError.json": "tensor a: the name is there twice",
    "layout-field-missing.FormatError.json": "array` of length 3",
    "layout-not-canonical.FormatError.json": "canonical",
    "layout-not-json.FormatError.json": "layout:",
    "layout-shape-negative.FormatError.json": "negative extent",
    "layout-shape-overflows.FormatError.json": "needs more than 2^45 bytes",
    "layout-sorted-as-utf16.FormatError.json": "not sorted by name",
    "layout-sum-overflows.FormatError.json": "more than 2^45 bytes together",
    "layout-unsorted.FormatError.json": "not sorted by name",
    "lz4-copies-from-before-start.FormatError.safetensors": "lz4 frame does not decode",
    "lz4-longer-than-due.FormatError.safetensors": "lz4 frame does not decode into 6 bytes",
    "lz4-shorter-than-due.FormatError.safetensors": "lz4 frame holds 5 bytes, 6 are due",
    "manifest-anchor-key-climbs-out.FormatError.json": "is not a plain key",
    "manifest-count-negative.FormatError.json": "$.totals.changed",
    "manifest-cut-short.FormatError.json": "no newline",
    "manifest-delta-skips-version.FormatError.json": "do not fit kind 'delta'",
    "manifest-delta-without-groups.FormatError.json": "do not fit kind 'delta'",
    "manifest-delta-without-shards.FormatError.json": "do not fit kind 'delta'",
    "manifest-empty-with-shards.FormatError.json": "do not fit kind 'empty'",
    "manifest-field-missing.FormatError.json": "totals",
    "manifest-full-with-shards.FormatError.json": "do not fit kind 'full'",
    "manifest-full-without-anchor.FormatError.json": "do not fit kind 'full'",
    "manifest-index-backwards.FormatError.json": "are not inside the shard",
    "manifest-index-outside-shard.FormatError.json": "are not inside the shard",
    "manifest-kind-unknown.FormatError.json": "$.kind",
    "manifest-layout-not-digest.FormatError.json": "$.layout",
    "manifest-level-above.UnsupportedFormat.json": "format level 2",
    "manifest-not-json.FormatError.json": "malformed",
    "manifest-not-utf8.FormatError.json": "manifest of version 1",
    "manifest-partition-without-delta.FormatError.json": "has no parts, but names a partition",
    "manifest-present-not-base64.FormatError.json": "$.present",
    "manifest-prev-empty.FormatError.json": "prev must be empty for version 0",
    "manifest-prev-not-hex.FormatError.json": "$.prev",
    "manifest-rewind-to-itself.FormatError.json": "do not fit kind 'rewind'",
    "manifest-shard-key-absolute.FormatError.json": "is not a plain key",
    "manifest-shard-key-climbs-out.FormatError.json": "is not a plain key",
    "manifest-state-not-hex.FormatError.json": "$.state",
    "manifest-unknown-need.UnsupportedFormat.json": "needs ['vortex']",
    "manifest-version-above-limit.FormatError.json": "$.version",
    "manifest-version-differs.FormatError.json": "it says version 2",
    "mask-all-zero.FormatError.safetensors": "it holds no change",
    "mask-beside-planes.FormatError.safetensors": "planes [0, 1, 2, 8, 9, 16, 17, 32]",
    "mask-frame-longer-than-group.FormatError.safetensors": "mask frame 0: 32 bytes announced",
    "mask-frame-outside.FormatError.safetensors": "mask frame 1: 24 bytes announced",
    "mask-frame-twice.FormatError.safetensors": "mask frames are not sorted",
    "outer-declares-petabyte.FormatError.safetensors": "outer zstd frame declares 1125899906842624 bytes, at most 92",
    "outer-not-zstd.FormatError.safetensors": "zstd frame",
    "parts-position-outside-box.FormatError.safetensors": "its last change lies outside its 4 elements",
    "parts-record-for-anothers-box.FormatError.safetensors": "names a tensor of which the part has no box",
    "parts-record-part-unknown.FormatError.safetensors": "names a part of which it has no data",
    "parts-record-twice.FormatError.safetensors": "changed tensors are not sorted",
    "parts-record-without-data.FormatError.safetensors": "names a part of which it has no data",
    "parts-records-unsorted.FormatError.safetensors": "changed tensors are not sorted",
    "partition-box-dimensions-differ.FormatError.json": "a box has another number of dimensions",
    "partition-box-of-one-dimension.FormatError.json": "it cannot be cut other than by rows",
    "partition-element-twice.FormatError.json": "tensor b: parts hold 7 of its 6 elements",
    "partition-field-unknown.FormatError.json": "unknown field",
    "partition-hole-and-element-twice.FormatError.json": "parts hold 6 of its 6 elements, or some of them twice",
    "partition-hole.FormatError.json": "tensor b: parts hold 5 of its 6 elements",
    "partition-not-canonical.FormatError.json": "not in the canonical form",
    "partition-not-json.FormatError.json": "partition:",
    "partition-number-negative.FormatError.json": "`int` >= 0",
    "partition-number-of-70-bits.FormatError.json": "`int` <=",
    "partition-of-another-layout.FormatError.json": "it cuts layout 000000000000",
    "partition-rows-backwards.FormatError.json": "a run of rows is empty, or lies outside of it",
    "partition-rows-outside.FormatError.json": "a run of rows is empty, or lies outside of it",
    "partition-rows-ragged.FormatError.json": "rows of part 1 end in half an entry",
    "partition-run-many-times.FormatError.json": "600 whole tensors, the layout has 2",
    "partition-runs-of-billions.FormatError.json": "a run of whole tensors is not in the layout",
    "partition-tensor-twice.FormatError.json": "tensor a: parts hold 12 of its 6 elements",
    "partition-tensor-unknown.FormatError.json": "a run of whole tensors is not in the layout",
    "partition-unsorted.FormatError.json": "not in the canonical form",
    "placement-absolute.FormatError.json": "is not a plain name inside the folder",
    "placement-climbs-out.FormatError.json": "is not a plain name inside the folder",
    "placement-file-twice.FormatError.json": "two files have the same name",
    "placement-hidden.FormatError.json": "is not a plain name inside the folder",
    "placement-in-subfolder.FormatError.json": "is not a plain name inside the folder",
    "placement-index-climbs-out.FormatError.json": "is not a plain name inside the folder",
    "placement-index-metadata-not-object.FormatError.json": "index_metadata",
    "placement-mode-setuid.FormatError.json": "$.files[0].mode",
    "placement-tensor-missing.FormatError.json": "every tensor exactly once",
    "placement-tensor-twice.FormatError.json": "every tensor exactly once",
    "placement-tensor-unknown.FormatError.json": "every tensor exactly once",
    "plane-block-not-zero.FormatError.safetensors": "plane 8: frames hold",
    "plane-cut-elsewhere.FormatError.safetensors": "plane 16: frames hold 6 bytes, the counts demand 6",
    "plane-longer-than-counts-demand.FormatError.safetensors": "plane 8: frames hold 2 bytes, the counts demand 1",
    "plane-missing.FormatError.safetensors": "plane 2: frames hold 0 bytes, the counts demand 1",
    "plane-of-wider-element.FormatError.safetensors": "planes [0, 1, 2, 8, 9, 10,",
    "plane-raw-size-of-gigabytes.FormatError.safetensors": "plane 8: frames hold 4294967295 bytes, the counts demand 1",
    "plane-unknown.FormatError.safetensors": "planes [0, 1, 2, 3,",
    "position-outside-tile-high-byte.FormatError.safetensors": "tile 0: its last change lies outside",
    "position-outside-tile.FormatError.safetensors": "tile 0: its last change lies outside its 6 elements",
    "position-sum-outside-tile.FormatError.safetensors": "tile 0: its last change lies outside",
    "shard-frame-empty.FormatError.safetensors": "a frame is empty",
    "shard-frame-in-index.FormatError.safetensors": "overlap or lie outside",
    "shard-frame-offset-wraps.FormatError.safetensors": "lie outside the shard",
    "shard-frame-outside.FormatError.safetensors": "lie outside the shard",
    "shard-frame-unaligned.FormatError.safetensors": "multiple of 16",
    "shard-frames-overlap.FormatError.safetensors": "frames overlap",
    "shard-frames-unsorted.FormatError.safetensors": "not sorted by group, plane and offset",
    "shard-group-unknown.FormatError.safetensors": "names a group that the layout does not have",
    "shard-index-elsewhere.FormatError.safetensors": "first tensor is not the index that the manifest names",
    "shard-index-not-first.FormatError.safetensors": "first tensor is not the index",
    "shard-index-range-outside.FormatError.safetensors": "does not hold whole records",
    "shard-index-records-ragged.FormatError.safetensors": "does not hold whole records",
    "shard-part-named.FormatError.safetensors": "names a part",
    "shard-tensor-twice.FormatError.safetensors": "changed tensors are not sorted",
    "shard-tensor-unknown.FormatError.safetensors": "changed tensors are not sorted, or not in the layout",
    "side-file-absolute.FormatError.json": "is not a plain name",
    "side-file-backslash.FormatError.json": "is not a plain name",
    "side-file-climbs-out-in-the-middle.FormatError.json": "is not a plain name",
    "side-file-climbs-out.FormatError.json": "is not a plain name",
    "side-file-drive.FormatError.json": "is not a plain name",
    "side-file-hidden.FormatError.json": "is not a plain name",
    "side-file-mode-setuid.FormatError.json": "$.side_files[0].mode",
    "side-file-nameless.FormatError.json": "is not a plain name",
    "side-file-newline.FormatError.json": "is not a plain name",
    "side-file-twice.FormatError.json": "two files",
    "snappy-bytes-after-end.FormatError.safetensors": "snappy frame does not decode",
    "snappy-declares-gigabytes.FormatError.safetensors": "snappy frame declares 4294967295 bytes, 6 are due",
    "store-group-not-in-present.FormatError": "shards hold groups [0], the manifest names [1]",
    "store-group-twice.FormatError": "shards hold groups [0, 0], the manifest names [0]",
    "store-layout-differs-from-name.IntegrityError": "not its name",
    "store-level-above.UnsupportedFormat": "format level 2",
    "store-of-others-manifests.FormatError": "store.json is other",
    "store-shard-checksum-differs.IntegrityError": "checksum differs",
    "store-shard-cut-short.IntegrityError": "bytes found",
    "store-state-differs.FormatError": "its changed tensors lead to state",
    "zstd-bytes-after-end.FormatError.safetensors": "unused data",
    "zstd-cut-short.FormatError.safetensors": "zstd frame does not decode",
    "zstd-declares-petabyte.FormatError.safetensors": "zstd frame declares 1125899906842624 bytes, 6 are due",
    "zstd-frame-after-frame.FormatError.safetensors": "unused data",
    "zstd-longer-than-due.FormatError.safetensors": "did not decompress full frame",
    "zstd-not-zstd.FormatError.safetensors": "zstd frame does not decode",
}
"""Every hostile file, and a part of the message that it must meet."""


@pytest.mark.parametrize("name", sorted(RULES))
def test_hostile_file_meets_the_error_in_its_name(name: str) -> None:
    rule, error = name.split(".")[:2]
    with pytest.raises(errors.DeltaError) as caught:
        DECODERS[rule.split("-")[0]](INVALID / name)
    assert type(caught.value) is getattr(errors, error)
    assert RULES[name] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_table_names_every_hostile_file() -> None:
    assert sorted(RULES) == sorted(path.name for path in INVALID.iterdir())


def test_message_is_short_whatever_the_file_holds() -> None:
    """One line that fits a screen, also where the fault is 100,000 brackets."""
    for name in RULES:
        with pytest.raises(errors.DeltaError) as caught:
            DECODERS[name.split("-")[0]](INVALID / name)
        assert len(str(caught.value)) < 600, name
