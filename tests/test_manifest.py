"""Records of the store: every rule, with the class of its error."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from deltackpt import manifest as m
from deltackpt.errors import FormatError, UnsupportedFormat

HEX64, HEX16, HEX32 = "ab" * 32, "cd" * 8, "ef" * 16
TOTALS = {"elements": 4, "changed": 1, "raw": 8, "stored": 300}
SHARD = {"key": "data/x/s.safetensors", "nbytes": 300, "xxh3_128": HEX32, "frames": [80, 112], "tensors": [112, 128]}
COMMON: dict[str, object] = {
    "format": 1, "store_id": "s", "lineage": "l", "layout": HEX64, "placement": HEX64, "state": HEX16,
    "nonce": "n" * 16, "totals": TOTALS,
}  # fmt: skip
ANCHOR = {"key": "anchors/0.json", "sha256": HEX64}
FULL = COMMON | {"version": 0, "kind": "full", "anchor": ANCHOR}
DELTA = COMMON | {"version": 5, "kind": "delta", "prev": HEX64, "base": 4, "shards": [SHARD], "present": "AQ=="}
EMPTY = COMMON | {"version": 5, "kind": "empty", "prev": HEX64, "base": 4}
REWIND = COMMON | {"version": 5, "kind": "rewind", "prev": HEX64, "base": 2}


def line(record: object) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def without(record: dict[str, object], *names: str) -> dict[str, object]:
    return {k: v for k, v in record.items() if k not in names}


@pytest.mark.parametrize(("record", "version"), [(FULL, 0), (DELTA, 5), (EMPTY, 5), (REWIND, 5)])
def test_each_kind_is_read_and_written_again(record: dict[str, object], version: int) -> None:
    manifest = m.decode_manifest(line(record), version)
    assert (manifest.kind, manifest.version) == (record["kind"], version)
    assert m.decode_manifest(m.encode(manifest), version) == manifest


def test_full_version_may_follow_another() -> None:
    assert m.decode_manifest(line(FULL | {"version": 7, "prev": HEX64}), 7).base is None


def test_unknown_fields_are_ignored_everywhere() -> None:
    later = DELTA | {"later": {"a": [1]}, "totals": TOTALS | {"later": 1}, "shards": [SHARD | {"later": None}]}
    assert m.decode_manifest(line(later), 5) == m.decode_manifest(line(DELTA), 5)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"format": 2}, r"format level 2, this reader knows \(1,\); update deltackpt"),
        ({"format": 0}, "format level 0"),
        ({"needs": ["zz-later", "ans"]}, r"needs \['ans', 'zz-later'\]; update deltackpt"),
        # A newer reader's record need not look like ours in anything else.
        ({"format": 2, "kind": "merge", "layout": 7}, "format level 2"),
        ({"needs": ["parts"], "shards": "elsewhere"}, r"needs \['parts'\]"),
    ],
)
def test_what_needs_a_newer_reader_is_unsupported(edit: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=f"manifest of version 5: .*{message}"):
        m.decode_manifest(line(DELTA | edit), 5)


def test_delta_in_parts_is_read_and_no_other_kind() -> None:
    assert m.decode_manifest(line(DELTA | {"partition": HEX64}), 5).partition == HEX64
    for record in (FULL | {"version": 5, "prev": HEX64}, EMPTY, REWIND):
        with pytest.raises(FormatError, match="has no parts, but names a partition"):
            m.decode_manifest(line(record | {"partition": HEX64}), 5)


def test_record_without_a_format_level_is_unsupported() -> None:
    with pytest.raises(UnsupportedFormat, match="format level 0"):
        m.decode_manifest(line(without(DELTA, "format")), 5)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (DELTA | {"version": 6, "base": 5}, "it says version 6"),
        (DELTA | {"version": -1}, r"\$\.version"),
        (DELTA | {"version": 10**18}, r"\$\.version"),
        (DELTA | {"kind": "merge"}, r"\$\.kind"),
        (DELTA | {"layout": HEX64[1:]}, r"\$\.layout"),
        (DELTA | {"layout": HEX64 + "\n"}, r"\$\.layout"),
        (DELTA | {"layout": HEX64.upper()}, r"\$\.layout"),
        (DELTA | {"placement": "../../etc/passwd"}, r"\$\.placement"),
        (DELTA | {"state": "0x" + HEX16[2:]}, r"\$\.state"),
        (DELTA | {"state": HEX16 + "\n"}, r"\$\.state"),
        (DELTA | {"nonce": "short"}, r"\$\.nonce"),
        (DELTA | {"nonce": "n" * 65}, r"\$\.nonce"),
        (DELTA | {"lineage": ""}, r"\$\.lineage"),
        (DELTA | {"epoch": -1}, r"\$\.epoch"),
        (DELTA | {"epoch": 1 << 63}, r"\$\.epoch"),
        (DELTA | {"metadata": {"a": 1}}, r"\$\.metadata"),
        (DELTA | {"present": "?"}, r"\$\.present"),
        (DELTA | {"totals": TOTALS | {"raw": -1}}, r"\$\.totals\.raw"),
        (DELTA | {"shards": [SHARD | {"xxh3_128": HEX32 + "\n"}]}, r"\$\.shards\[0\]\.xxh3_128"),
        (DELTA | {"shards": [SHARD | {"frames": [80]}]}, r"\$\.shards\[0\]\.frames"),
        (without(DELTA, "totals"), "totals"),
        (without(DELTA, "prev"), "prev must be empty for version 0 and only there"),
        (FULL | {"prev": HEX64}, "prev must be empty for version 0 and only there"),
        # kind: what it must have, and must not
        (without(FULL, "anchor"), "do not fit kind 'full'"),
        (FULL | {"base": 0}, "do not fit kind 'full'"),
        (FULL | {"shards": [SHARD]}, "do not fit kind 'full'"),
        (DELTA | {"base": 3}, "do not fit kind 'delta'"),
        (without(DELTA, "base"), "do not fit kind 'delta'"),
        (DELTA | {"shards": []}, "do not fit kind 'delta'"),
        (DELTA | {"present": "AAA="}, "do not fit kind 'delta'"),
        (EMPTY | {"base": 3}, "do not fit kind 'empty'"),
        (EMPTY | {"shards": [SHARD]}, "do not fit kind 'empty'"),
        (EMPTY | {"present": "AQ=="}, "do not fit kind 'empty'"),
        (without(REWIND, "base"), "do not fit kind 'rewind'"),
        (REWIND | {"base": 5}, "do not fit kind 'rewind'"),
        (REWIND | {"shards": [SHARD]}, "do not fit kind 'rewind'"),
        # index ranges
        (DELTA | {"shards": [SHARD | {"frames": [112, 80]}]}, "index ranges of data/x/s.safetensors are not inside"),
        (DELTA | {"shards": [SHARD | {"tensors": [100, 128]}]}, "index ranges"),
        (DELTA | {"shards": [SHARD | {"tensors": [112, 301]}]}, "index ranges"),
        # names that leave their place
        (DELTA | {"shards": [SHARD | {"key": "../victim"}]}, r"shard key '\.\./victim' is not a plain key"),
        (FULL | {"anchor": ANCHOR | {"key": "anchors/../../victim"}}, "anchor '.*victim' is not a plain key"),
        (
            EMPTY | {"side_files": [{"name": "../x", "sha256": HEX64, "nbytes": 1}]},
            r"side file '\.\./x' is not a plain",
        ),
        (EMPTY | {"side_files": [{"name": "x", "sha256": HEX64, "nbytes": 1, "mode": 0o4755}]}, "mode"),
    ],
)
def test_broken_rule_is_a_format_error_that_names_it(record: dict[str, object], message: str) -> None:
    version = 0 if record["version"] == 0 else 5
    with pytest.raises(FormatError, match=f"manifest of version {version}: .*{message}") as caught:
        m.decode_manifest(line(record), version)
    assert caught.type is FormatError


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\n", line(DELTA)[:-1], line(DELTA)[:40], b"[]\n", b"7\n", b"null\n", b"{}}\n", b"\xff\xfe\n",
        b'{"format":1,"needs":7}\n', b'{"format":"1"}\n', b'{"format":1e999999}\n',
        b'{"later":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    ],
    ids=range(13),
)  # fmt: skip
def test_bytes_that_are_no_manifest_are_a_format_error(data: bytes) -> None:
    """Deep nesting in an ignored field used to raise RecursionError."""
    with pytest.raises(FormatError, match="manifest of version 5: "):
        m.decode_manifest(data, 5)


def test_manifest_cut_before_its_newline_is_refused_as_cut() -> None:
    with pytest.raises(FormatError, match="no newline at the end of the first line, it may be cut short"):
        m.decode_manifest(line(DELTA)[:-1], 5)


def test_second_line_may_hold_a_signature_and_is_no_part_of_the_digest() -> None:
    signed = line(DELTA) + b'{"key_id":"k","ed25519":"AAAA"}\n'
    assert m.decode_manifest(signed, 5) == m.decode_manifest(line(DELTA), 5)
    assert m.digest(signed) == m.digest(line(DELTA))


def test_digest_is_sha256_of_the_first_line_with_its_newline() -> None:
    assert m.digest(b"{}\nsignature") == "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"


def test_keys_are_the_literal_ones() -> None:
    assert m.manifest_key(7) == "manifests/00000000000000000007.json"
    assert m.anchor_key(10**17) == "anchors/00100000000000000000.json"
    assert m.pruned_key(0) == "pruned/00000000000000000000.json"
    assert m.data_prefix(7, "a1b2") == "data/00000000000000000007-a1b2"


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("key", ["data/x", "data/x/y.safetensors", "manifests/00.json", "a/.hidden", "a/b+c=d@e-f_g"])
def test_plain_key_is_accepted(key: str) -> None:
    m.require_key(key, "key")


@pytest.mark.parametrize(
    "key",
    [
        "", "data", "/data/x", "data/", "data//x", "../x", "data/..", "data/../x", "data/./x", "data/x\n", "\ndata/x",
        "data/x y", "data/é", "data\\x", "data/a\0", "Data/x", "data/x/", "data/*", "data/\ud800", "s3://b/x",
    ],
)  # fmt: skip
def test_key_that_is_not_plain_is_refused(key: str) -> None:
    """A newline at the end used to pass: $ matches before it."""
    with pytest.raises(FormatError, match=r"the key .* is not a plain key inside the store"):
        m.require_key(key, "the key")


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors", "a b", "é.json", "x..y", "-dash"])
@pytest.mark.parametrize("folders", [True, False])
def test_plain_file_name_is_accepted(name: str, folders: bool) -> None:
    m.require_file_name(name, "file", folders=folders)


def test_folders_are_accepted_only_where_allowed() -> None:
    m.require_file_name("1_Pooling/config.json", "file")
    with pytest.raises(FormatError, match=r"file '1_Pooling/config.json' is not a plain name inside the folder"):
        m.require_file_name("1_Pooling/config.json", "file", folders=False)


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../x", "a/../x", "/x", "x/", "a//b", ".hidden", "a/.hidden", "a\\b", "C:x", "a\0.safetensors",
        "a\nb", "a\x1fb", "x" * 1025, "é" * 513, "\ud800.json",
    ],
)  # fmt: skip
def test_file_name_that_leaves_its_folder_is_refused(name: str) -> None:
    """A name that is no Unicode text used to raise UnicodeEncodeError."""
    with pytest.raises(FormatError, match="is not a plain name inside the folder"):
        m.require_file_name(name, "file")


# ---------------------------------------------------------------- placement

FILES = [{"name": "a.safetensors", "tensors": [2, 0]}, {"name": "b.safetensors", "tensors": [1], "metadata": {}}]


def test_placement_is_read() -> None:
    placement = m.decode_placement(line({"files": FILES, "index": "model.safetensors.index.json"}), 3)
    assert [f.tensors for f in placement.files] == [(2, 0), (1,)]
    assert [f.metadata for f in placement.files] == [None, {}]
    assert m.decode_placement(m.encode(placement), 3) == placement


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"files": FILES[:1]}, "does not name every tensor exactly once"),
        ({"files": [*FILES, {"name": "c", "tensors": [1]}]}, "does not name every tensor exactly once"),
        ({"files": [*FILES, {"name": "c", "tensors": [3]}]}, "does not name every tensor exactly once"),
        ({"files": [*FILES, {"name": "c", "tensors": [-1]}]}, "tensors"),
        ({"files": [*FILES, {"name": "a.safetensors", "tensors": []}]}, "two files have the same name"),
        ({"files": FILES, "index": "a.safetensors"}, "two files have the same name"),
        ({"files": FILES, "index": "../model.safetensors.index.json"}, "is not a plain name inside the folder"),
        ({"files": [*FILES, {"name": "sub/c", "tensors": []}]}, "is not a plain name inside the folder"),
        ({"files": [*FILES, {"name": "c", "tensors": [], "mode": 0o1777}]}, "mode"),
        ({"files": FILES, "index": "i.json", "index_metadata": "[1"}, "index_metadata: Input data was truncated"),
        ({"files": FILES, "index": "i.json", "index_metadata": "[]"}, "index_metadata is not a JSON object"),
        ({}, "files"),
    ],
)
def test_broken_placement_is_a_format_error(record: dict[str, object], message: str) -> None:
    """A bad index_metadata used to surface only when the index was written, as ValueError or TypeError."""
    with pytest.raises(FormatError, match=f"placement: .*{message}"):
        m.decode_placement(line(record), 3)


# ---------------------------------------------------------------- anchor

RECORD: dict[str, object] = {
    "format": 1, "version": 5, "layout": HEX64, "placement": HEX64, "state": HEX16, "folder": "data/5-a/anchor",
    "files": [{"name": "1_Pooling/config.json", "nbytes": 3, "xxh3_128": HEX32}],
    "fingerprints": "AAAAAAAAAAAAAAAAAAAAAA==",
}  # fmt: skip


def test_anchor_is_read() -> None:
    anchor = m.decode_anchor(line(RECORD), 5, 2)
    assert (anchor.folder, anchor.fingerprints, anchor.source) == ("data/5-a/anchor", bytes(16), "")
    assert m.decode_anchor(m.encode(anchor), 5) == anchor


def test_anchor_by_reference_has_no_folder() -> None:
    assert m.decode_anchor(line(RECORD | {"folder": None, "source": "/models/x"}), 5, 2).source == "/models/x"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"version": 4}, "it says version 4"),
        ({"fingerprints": "AAAAAAAAAAA="}, "8 bytes of fingerprints for 2 tensors"),
        ({"folder": "../x"}, "folder '../x' is not a plain key"),
        ({"folder": "data"}, "folder 'data' is not a plain key"),
        ({"files": [{"name": "../x", "nbytes": 3, "xxh3_128": HEX32}]}, "file '../x' is not a plain name"),
        ({"files": [{"name": "x", "nbytes": -3, "xxh3_128": HEX32}]}, "nbytes"),
    ],
)
def test_broken_anchor_is_a_format_error(edit: dict[str, object], message: str) -> None:
    with pytest.raises(FormatError, match=f"anchor of version 5: .*{message}"):
        m.decode_anchor(line(RECORD | edit), 5, 2)


def test_anchor_of_a_later_level_is_unsupported() -> None:
    with pytest.raises(UnsupportedFormat, match="format level 2"):
        m.decode_anchor(line(RECORD | {"format": 2}), 5, 2)


@pytest.mark.parametrize(
    "decode",
    [
        lambda data: m.decode_placement(data, 1),
        lambda data: m.decode_anchor(data, 1),
        lambda data: m.decode(data, m.StoreInfo, "store.json"),
    ],
)
@pytest.mark.parametrize("data", [b"", b"\xff", b"[", b"{", b'"', b"null", b'{"format":'])
def test_every_record_refuses_what_is_no_json(decode: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(FormatError):
        decode(data)
