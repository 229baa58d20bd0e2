"""A mirror is a store of its own: byte for byte, checked, resumed after any death, never from another stream."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import make_cases
import pytest
from faults import FaultStore
from helpers import REPOSITORY, cli_good, cli_run, data_files, refused, visible

from deltackpt import mirror as module
from deltackpt.anchor import make_anchor
from deltackpt.codec import Bytes
from deltackpt.errors import AlreadyExists, ChainError, ConfigError, IntegrityError, NotFound, StoreError, Unavailable
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower
from deltackpt.lease import leases
from deltackpt.manifest import manifest_key, pruned_key
from deltackpt.mirror import Mirror, MirrorReport, mirror_store
from deltackpt.prune import prune_store
from deltackpt.publish import publish_folder
from deltackpt.reader import Reader
from deltackpt.store import LocalStore, Store
from deltackpt.verify import verify_store

NOW = 1_900_000_000.0


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """v0 to v6, and a store of them with an anchor beside version 4."""
    root = tmp_path_factory.mktemp("master")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        make_cases.chain(root, 6)
        for v in range(7):
            publish_folder(str(root / f"v{v}"), str(root / "store"), anchors=False, run_id="run")
        make_anchor(str(root / "store"), 4)
        yield root


@pytest.fixture
def src(master: Path, tmp_path: Path) -> Path:
    shutil.copytree(master / "store", tmp_path / "src")
    return tmp_path / "src"


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    return tmp_path / "dst"


def mirrored(src: Path | Store, dst: Path | Store, **options: object) -> MirrorReport:
    stores = [LocalStore(s) if isinstance(s, Path) else s for s in (src, dst)]
    return mirror_store(*stores, **options)  # type: ignore[arg-type]  # any


def prune(path: Path) -> None:
    """Remove all that nothing needs; a lease of this very test is not to count."""
    shutil.rmtree(path / "followers", ignore_errors=True)
    prune_store(LocalStore(path), dry_run=False, grace_s=0.0)


def files(root: Path) -> dict[str, bytes]:
    """Every object of a store but leases."""
    found = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    return {k: v for k, v in found.items() if not k.startswith("followers/")}


def exact(master: Path, store: Path, *versions: int) -> None:
    """A newcomer gets each of the versions, bit for bit."""
    for version in versions:
        dest = store.parent / f"newcomer-{version}"
        shutil.rmtree(dest, ignore_errors=True)
        with Follower(str(store), CheckpointTarget(dest)) as follower:
            prepared = follower.prepare(version)
            assert prepared is not None
            prepared.apply()
        assert make_cases.ckpt_digest(dest) == make_cases.ckpt_digest(master / f"v{version}")


def flip(path: Path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(bytes(raw))


def shard(store: Path, version: int) -> Path:
    (found,) = [p for p in (store / "data").glob(f"{version:020d}-*/*.safetensors") if "-anchor-" not in str(p)]
    return found


# ---------------------------------------------------------------- copies


def test_mirror_is_byte_for_byte_what_its_source_is(src: Path, dst: Path, master: Path) -> None:
    report = mirrored(src, dst)
    assert report.versions == (0, 1, 2, 3, 4, 5, 6)
    assert (report.without_data, report.anchors, report.head, report.found) == ((), (), 6, 0)
    ours = {k: v for k, v in files(src).items() if "anchor-" not in k and not k.startswith("anchors/")}
    assert files(dst) == ours
    assert report.nbytes == sum(len(v) for k, v in ours.items() if k.split("/")[0] not in ("manifests", "store.json"))
    exact(master, dst, *range(7))
    assert verify_store(LocalStore(dst), deep=True).problems == ()


def test_second_run_copies_only_what_is_new(src: Path, dst: Path, master: Path) -> None:
    mirrored(src, dst)
    assert mirrored(src, dst) == MirrorReport((), (), (), 6, 0, 0)
    publish_folder(str(master / "v0"), str(src), run_id="run", anchors=False)
    report = mirrored(src, dst)
    assert (report.versions, report.head) == ((7,), 7)
    stored = shard(src, 7).stat().st_size
    assert report.nbytes == stored


def test_idle_look_is_one_request_to_the_source(src: Path, dst: Path) -> None:
    watched = FaultStore(LocalStore(src))
    job = Mirror(watched, LocalStore(dst), now=lambda: NOW)
    job.once()
    before = len(watched.operations)
    assert job.once().versions == ()
    assert watched.operations[before:] == [f"get {manifest_key(7)}"]


def test_folder_that_followed_the_source_follows_the_mirror(src: Path, dst: Path, master: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    with Follower(str(src), CheckpointTarget(dest)) as follower:
        prepared = follower.prepare(2)
        assert prepared is not None
        prepared.apply()
    mirrored(src, dst)
    with Follower(str(dst), CheckpointTarget(dest)) as follower:
        prepared = follower.prepare()
        assert prepared is not None
        assert prepared.previous == 2
        prepared.apply()
    assert make_cases.ckpt_digest(dest) == make_cases.ckpt_digest(master / "v6")


def test_store_without_a_version_gives_an_empty_mirror(tmp_path: Path) -> None:
    source = LocalStore(tmp_path / "src")
    source.put("store.json", [b'{"format":1,"store_id":"x","created":0.0}\n'])
    report = mirrored(tmp_path / "src", tmp_path / "dst")
    assert (report.versions, report.head) == ((), None)
    assert (tmp_path / "dst" / "store.json").read_bytes() == b'{"format":1,"store_id":"x","created":0.0}\n'


@pytest.mark.parametrize(
    ("start", "anchor", "bare"),
    [("newest", 4, (0, 1, 2, 3, 4)), (5, 4, (0, 1, 2, 3, 4)), (4, 4, (0, 1, 2, 3, 4)), (3, None, ()), (0, None, ())],
)
def test_empty_mirror_begins_at_an_anchor(
    src: Path, dst: Path, master: Path, start: int | str, anchor: int | None, bare: tuple[int, ...]
) -> None:
    report = mirrored(src, dst, start=start)
    assert (report.anchors, report.without_data) == (() if anchor is None else (anchor,), bare)
    assert visible(dst) == [0, 1, 2, 3, 4, 5, 6]
    exact(master, dst, 4, 5, 6)
    found = verify_store(LocalStore(dst), deep=True)
    assert (found.problems, found.pruned) == ((), bare)
    # Once it has begun, the option says nothing any more.
    publish_folder(str(master / "v0"), str(src), run_id="run", anchors=False)
    make_anchor(str(src), 7)
    assert mirrored(src, dst, start="newest").anchors == ()


def test_start_after_the_head_is_refused(src: Path, dst: Path) -> None:
    with pytest.raises(ChainError, match="version 7 is not in the store, which ends at 6"):
        mirrored(src, dst, start=7)


def test_start_before_every_anchor_is_refused(src: Path, dst: Path) -> None:
    prune(src)
    with pytest.raises(ChainError, match="no anchor at or before version 3; make one with deltackpt anchor"):
        mirrored(src, dst, start=3)


def test_pruned_source_is_mirrored_from_its_first_anchor(src: Path, dst: Path, master: Path) -> None:
    prune(src)
    report = mirrored(src, dst)
    assert (report.anchors, report.without_data) == ((4,), (0, 1, 2, 3, 4))
    assert files(dst).keys() == files(src).keys() - {"pruned/clock.json", f"pruned/{0:020d}-anchor.json"}
    assert (dst / pruned_key(2)).read_bytes() == (src / pruned_key(2)).read_bytes()
    exact(master, dst, 4, 5, 6)


def test_mirror_left_behind_by_a_prune_goes_on_from_the_next_anchor(src: Path, dst: Path, master: Path) -> None:
    whole = shutil.copytree(src, src.parent / "whole")
    for v in range(2, 7):
        (src / manifest_key(v)).unlink()
    mirrored(src, dst)
    assert visible(dst) == [0, 1]
    shutil.rmtree(src)
    shutil.copytree(whole, src)
    prune(src)
    report = mirrored(src, dst)
    assert (report.versions, report.without_data, report.anchors) == ((2, 3, 4, 5, 6), (2, 3, 4), (4,))
    exact(master, dst, 0, 1, 4, 5, 6)


def test_source_that_leads_nowhere_is_refused_before_anything_is_copied(src: Path, dst: Path) -> None:
    for v in (0, 1, 2, 3, 4):
        (src / pruned_key(v)).parent.mkdir(exist_ok=True)
        (src / pruned_key(v)).write_text("{}\n")
    (src / "pruned" / f"{4:020d}-anchor.json").write_text("{}\n")
    with pytest.raises(ChainError, match=r"versions 0 to 6 cannot be rebuilt .* make an anchor there"):
        mirrored(src, dst)
    assert visible(dst) == []
    assert data_files(dst) == []


def test_rewind_and_empty_version_come_along(src: Path, dst: Path, master: Path) -> None:
    assert publish_folder(str(master / "v2"), str(src), run_id="run", resume=True).kind == "rewind"
    assert publish_folder(str(master / "v2"), str(src), run_id="run", resume=True).kind == "empty"
    mirrored(src, dst)
    assert visible(dst) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    with Follower(str(dst), CheckpointTarget(dst.parent / "dest")) as follower:
        prepared = follower.prepare()
        assert prepared is not None
        prepared.apply()
    assert make_cases.ckpt_digest(dst.parent / "dest") == make_cases.ckpt_digest(master / "v2")


def test_rewind_behind_what_the_mirror_has_waits_for_an_anchor(src: Path, dst: Path, master: Path) -> None:
    mirrored(src, dst, start="newest")
    assert publish_folder(str(master / "v2"), str(src), run_id="run", resume=True, anchors=False).kind == "rewind"
    with pytest.raises(ChainError, match="versions 7 to 7 cannot be rebuilt"):
        mirrored(src, dst)
    make_anchor(str(src), 7)
    assert mirrored(src, dst).anchors == (7,)
    assert verify_store(LocalStore(dst), deep=True).problems == ()


def test_new_lineage_comes_with_its_full_version(src: Path, dst: Path, master: Path) -> None:
    mirrored(src, dst)
    assert publish_folder(str(master / "v1"), str(src), new_lineage=True).kind == "full"
    assert mirrored(src, dst).versions == (7,)
    assert verify_store(LocalStore(dst), deep=True).problems == ()


def test_anchor_by_reference_comes_as_the_record_that_it_is(master: Path, tmp_path: Path) -> None:
    for v in range(3):
        publish_folder(str(master / f"v{v}"), str(tmp_path / "src"), anchors=False, anchor_ref=v == 0, run_id="run")
    mirrored(tmp_path / "src", tmp_path / "dst")
    assert files(tmp_path / "dst") == files(tmp_path / "src")


def test_large_files_are_read_in_pieces(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 100)
    largest = 0

    class Measured(LocalStore):
        def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None:
            def seen() -> Iterator[Bytes]:
                nonlocal largest
                for part in parts:
                    if key.startswith("data/"):
                        largest = max(largest, len(part))
                    yield part

            super().put(key, seen(), if_absent=if_absent)  # type: ignore[arg-type]  # iterated once

    mirrored(src, Measured(dst))
    assert largest == 100
    assert verify_store(LocalStore(dst)).problems == ()


# ---------------------------------------------------------------- refusals


def test_mirror_of_another_store_is_refused(src: Path, dst: Path, master: Path) -> None:
    publish_folder(str(master / "v0"), str(dst), run_id="other")
    refused(lambda: mirrored(src, dst), "is store ", "name an empty DST", error=ConfigError, store=dst)


def test_forked_mirror_is_refused(src: Path, dst: Path, master: Path) -> None:
    mirrored(src, dst)
    publish_folder(str(master / "v1"), str(dst), run_id="run", anchors=False)
    publish_folder(str(master / "v2"), str(src), run_id="run", anchors=False)
    refused(lambda: mirrored(src, dst), "version 7 of ", "forked", error=ChainError, store=dst)


def test_mirror_that_is_ahead_is_refused(src: Path, dst: Path, master: Path) -> None:
    mirrored(src, dst)
    publish_folder(str(master / "v1"), str(dst), run_id="run", anchors=False)
    refused(lambda: mirrored(src, dst), "is at version 7", "ends at 6", "swapped", error=ChainError, store=dst)


def test_store_is_no_mirror_of_itself(src: Path) -> None:
    with pytest.raises(ConfigError, match="same store"):
        mirrored(src, src)
    (src.parent / "link").symlink_to(src)
    with pytest.raises(ConfigError, match="same store"):
        mirrored(src, src.parent / "link")


def test_source_that_is_no_store_is_refused_and_no_mirror_is_made(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    with pytest.raises(StoreError, match="holds no store"):
        mirrored(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("what", ["shard", "anchor", "layout"])
def test_damage_is_never_copied(src: Path, dst: Path, what: str) -> None:
    (anchor,) = (src / "data").glob("*-anchor-*")
    files_of = {
        "shard": shard(src, 5),
        "anchor": sorted(anchor.glob("*.safetensors"))[0],
        "layout": next((src / "layouts").iterdir()),
    }
    original = files_of[what].read_bytes()
    flip(files_of[what])
    with pytest.raises(IntegrityError, match=r"checksum|SHA-256"):
        mirrored(src, dst, start="newest")
    assert not (dst / files_of[what].relative_to(src)).exists()
    assert verify_store(LocalStore(dst)).problems == ()
    files_of[what].write_bytes(original)
    mirrored(src, dst, start="newest")
    assert visible(dst) == [0, 1, 2, 3, 4, 5, 6]
    assert verify_store(LocalStore(dst), deep=True).problems == ()


def test_shard_of_another_length_is_damage(src: Path, dst: Path) -> None:
    shard(src, 2).write_bytes(shard(src, 2).read_bytes() + b"x")
    with pytest.raises(IntegrityError, match=r"version 2: .* bytes in .* are expected"):
        mirrored(src, dst)
    assert visible(dst) == [0, 1]


@pytest.mark.parametrize("cut", [False, True])
def test_leftover_of_the_right_name_with_other_bytes_is_replaced(src: Path, dst: Path, cut: bool) -> None:
    for v in range(7):
        if v != 3:
            continue
        place = dst / shard(src, v).relative_to(src)
        place.parent.mkdir(parents=True)
        place.write_bytes(shard(src, v).read_bytes()[: -1 if cut else None])
        if not cut:
            flip(place, 200)
    mirrored(src, dst)
    assert shard(dst, 3).read_bytes() == shard(src, 3).read_bytes()
    assert verify_store(LocalStore(dst), deep=True).problems == ()


# ---------------------------------------------------------------- races


class Meanwhile(LocalStore):
    """Calls something before the first put of a key that begins with `prefix`."""

    def __init__(self, root: Path, prefix: str, call: Callable[[], object]) -> None:
        super().__init__(root)
        self._prefix = prefix
        self._call: Callable[[], object] | None = call

    def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None:
        if key.startswith(self._prefix) and self._call is not None:
            call, self._call = self._call, None
            call()
        super().put(key, parts, if_absent=if_absent)


@pytest.mark.parametrize("start", [None, "newest"])
@pytest.mark.parametrize("prefix", ["store.json", "data/", "layouts/", "files/", "anchors/", "pruned/", "manifests/"])
def test_two_at_once_both_succeed(src: Path, dst: Path, prefix: str, start: str | None) -> None:
    others: list[MirrorReport] = []
    report = mirrored(src, Meanwhile(dst, prefix, lambda: others.append(mirrored(src, dst, start=start))), start=start)
    assert report.head == 6
    assert all(other.head == 6 for other in others)
    alone = src.parent / "alone"
    mirrored(src, alone, start=start)
    strip = {k: v for k, v in files(dst).items() if not k.startswith("pruned/")}
    assert strip == {k: v for k, v in files(alone).items() if not k.startswith("pruned/")}
    assert files(dst).keys() == files(alone).keys()


def test_other_publisher_that_commits_into_the_mirror_meanwhile_is_a_fork(src: Path, dst: Path, master: Path) -> None:
    mirrored(src, dst)
    publish_folder(str(master / "v0"), str(src), run_id="run", anchors=False)

    def fork() -> None:
        publish_folder(str(master / "v1"), str(dst), run_id="run", anchors=False)

    with pytest.raises(ChainError, match=r"version 7 of .* forked"):
        mirrored(src, Meanwhile(dst, "data/", fork))


def test_source_pruned_while_it_is_copied_is_mirrored_from_its_anchor(src: Path, dst: Path, master: Path) -> None:
    report = mirrored(src, Meanwhile(dst, f"data/{2:020d}", lambda: prune(src)))
    assert report.anchors == (4,)
    assert report.head == 6
    exact(master, dst, 0, 1, 4, 5, 6)


def test_data_that_is_gone_without_a_record_is_named(src: Path, dst: Path) -> None:
    shutil.rmtree(shard(src, 3).parent)
    with pytest.raises(NotFound, match=f"data/{3:020d}-"):
        mirrored(src, dst)
    assert visible(dst) == [0, 1, 2]


# ---------------------------------------------------------------- leases


def test_lease_in_the_source_says_what_the_mirror_has(src: Path, dst: Path, master: Path) -> None:
    now = NOW
    job = Mirror(LocalStore(src), LocalStore(dst), now=lambda: now)
    job.once()
    (lease,) = leases(LocalStore(src))
    assert (lease.version, lease.staged, lease.mode, lease.dest) == (6, None, "mirror", str(dst))
    assert lease.live(NOW + 899)
    publish_folder(str(master / "v0"), str(src), run_id="run", anchors=False)
    now += 100
    job.once()
    (lease,) = leases(LocalStore(src))
    assert (lease.version, lease.expires) == (7, NOW + 1000)


def test_lease_may_be_elsewhere(src: Path, dst: Path, tmp_path: Path) -> None:
    mirrored(src, dst, lease_store=LocalStore(tmp_path / "leases"))
    assert not (src / "followers").exists()
    assert len(leases(LocalStore(tmp_path / "leases"))) == 1


def test_source_that_cannot_be_written_is_mirrored_without_a_lease(src: Path, dst: Path) -> None:
    class ReadOnly(LocalStore):
        def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None:
            raise StoreError(f"writing {key}: read-only")

    said: list[str] = []
    assert mirrored(ReadOnly(src), dst, say=said.append).head == 6
    assert len(said) == 1
    assert "no lease in" in said[0]


# ---------------------------------------------------------------- death


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """v0 to v3, and a pruned store of them: an anchor beside version 2, and version 3."""
    root = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        make_cases.chain(root, 3)
        for v in range(4):
            publish_folder(str(root / f"v{v}"), str(root / "store"), anchors=False)
        make_anchor(str(root / "store"), 2)
        shutil.copytree(root / "store", root / "pruned")
        prune(root / "pruned")
        yield root


def _whole_or_refused(small: Path, store: Path, dest: Path) -> None:
    """A newcomer gets the newest version that the mirror shows, or is told that it cannot be had."""
    with Follower(str(store), CheckpointTarget(dest)) as follower:
        try:
            prepared = follower.prepare()
        except (StoreError, ChainError):
            return
        assert prepared is not None
        version = prepared.apply()
    assert make_cases.ckpt_digest(dest) == make_cases.ckpt_digest(small / f"v{version}")


@pytest.mark.parametrize("source", ["store", "pruned"])
# The source is only read, where before and after are the same.
@pytest.mark.parametrize(("side", "when"), [("src", "before"), ("dst", "before"), ("dst", "after")])
def test_death_at_any_operation_leaves_readers_exact_and_the_next_run_finishes(
    small: Path, tmp_path: Path, source: str, side: str, when: str
) -> None:
    def run(dst: Path, at: int | None) -> list[str]:
        shutil.copytree(small / source, tmp_path / "src", dirs_exist_ok=True)
        src_store: Store = LocalStore(tmp_path / "src")
        dst_store: Store = LocalStore(dst)
        faulty = FaultStore(src_store if side == "src" else dst_store, at=at, when=when)  # type: ignore[arg-type]  # literal
        with contextlib.suppress(Unavailable):
            # Goes well only without a fault, without a lease, or where the answer was an error of its own.
            mirror_store(*((faulty, dst_store) if side == "src" else (src_store, faulty)))
            assert at is None or when == "after" or faulty.operations[at - 1].startswith("put followers/")
        return faulty.operations

    count = len(run(tmp_path / "whole", None))
    assert count > 30
    expected = {k: v for k, v in files(tmp_path / "whole").items() if not k.startswith("pruned/")}
    for at in range(1, count + 1):
        dst = tmp_path / f"dst-{at}"
        operations = run(dst, at)
        _whole_or_refused(small, dst, tmp_path / f"dest-{at}")
        assert mirrored(tmp_path / "src", dst).head == 3
        assert {k: v for k, v in files(dst).items() if not k.startswith("pruned/")} == expected, operations[-1]
        assert files(dst).keys() == files(tmp_path / "whole").keys(), operations[-1]
        shutil.rmtree(dst)


def test_death_between_two_ways_leaves_no_record_on_what_is_there(src: Path, dst: Path, master: Path) -> None:
    """A run from the newest anchor died after its first record; the next one copies everything."""
    dying = FaultStore(LocalStore(dst), at=1, kinds=("put",))
    operations = FaultStore(LocalStore(src.parent / "count"), kinds=("put",))
    mirrored(src, operations, start="newest")
    first = next(n for n, o in enumerate(operations.operations, 1) if o.startswith("put pruned/"))
    dying.at = first + 1
    with pytest.raises(Unavailable):
        mirrored(src, dying, start="newest")
    assert (dst / pruned_key(0)).exists()
    mirrored(src, dst)
    assert Reader(LocalStore(dst)).pruned() == frozenset()
    exact(master, dst, 0, 3, 6)


# ---------------------------------------------------------------- watch and commands


def test_watch_copies_what_comes_and_waits_for_a_store_that_does_not_answer(src: Path, dst: Path, master: Path) -> None:
    stop, said, seen = threading.Event(), [], []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            if len(waits) == 1:
                publish_folder(str(master / "v0"), str(src), run_id="run", anchors=False)
            if len(waits) == 2:
                flaky.at = len(flaky.operations) + 1
            if len(waits) == 4:
                self.set()
            return self.is_set()

    waits: list[float] = []
    stop = Stop()
    flaky = FaultStore(LocalStore(src))
    job = Mirror(flaky, LocalStore(dst), say=said.append)
    job.watch(stop, poll_s=2.0, done=seen.append)
    assert [r.versions for r in seen] == [(0, 1, 2, 3, 4, 5, 6), (7,)]
    assert len(said) == 1
    assert said[0].endswith("trying again")
    assert [1.8 <= w <= 2.2 for w in waits] == [True, True, False, True]
    assert 3.6 <= waits[2] <= 4.4


def test_command_mirrors_and_says_so(src: Path, dst: Path) -> None:
    answer = cli_good("mirror", src, dst)
    assert (answer["versions"], answer["head"], answer["without_data"]) == ([0, 1, 2, 3, 4, 5, 6], 6, [])
    assert cli_run("mirror", src, dst).stdout == f"{dst}: at version 6 already\n"
    other = dst.parent / "other"
    text = cli_run("mirror", src, other, "--from", "newest").stdout
    assert text.startswith(f"{other}: at version 6 (7 versions, ")
    assert text.endswith(" copied, 5 versions without data, from the anchor of version 4)\n")


@pytest.mark.parametrize("text", ["", "-1", "latest", "1.5", "٣"])
def test_start_that_is_no_version_is_a_usage_error(src: Path, dst: Path, text: str) -> None:
    assert cli_run("mirror", src, dst, "--from", text).exit_code == 2
    assert not dst.exists()


def test_watching_command_ends_well_on_sigterm(src: Path, dst: Path) -> None:
    watcher = subprocess.Popen(
        [sys.executable, "-m", "deltackpt", "mirror", str(src), str(dst), "--watch", "--poll", "60", "--json"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert watcher.stderr is not None
    line = watcher.stderr.readline()
    assert line.startswith(f"deltackpt: {dst}: at version 6 (7 versions, ")
    watcher.send_signal(signal.SIGTERM)
    out, err = watcher.communicate(timeout=60)
    assert (watcher.returncode, err) == (0, "")
    assert json.loads(out)["copied"] == 7
    assert visible(dst) == [0, 1, 2, 3, 4, 5, 6]


def test_exclusive_create_in_the_mirror_that_is_lost_to_other_bytes_is_an_error(src: Path, dst: Path) -> None:
    class Liar(LocalStore):
        """Says that a shard is taken, whatever it holds."""

        def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None:
            if key.startswith("data/"):
                raise AlreadyExists(f"{key} exists already")
            super().put(key, parts, if_absent=if_absent)

    with pytest.raises(AlreadyExists):
        mirrored(src, Liar(dst))
    assert visible(dst) == []
