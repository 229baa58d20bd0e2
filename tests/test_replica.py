"""Ranks of one sampler: all at the new version or all at the old one, whoever fails, dies, stops or comes back."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import FaultStore
from helpers import REPOSITORY, raw_of, tensor_of

from deltackpt.board import Board, Group, StoreBoard, serve_tcp
from deltackpt.errors import ChainError, ConfigError, Fenced, IntegrityError, NotFound, RankFailed, Unavailable
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower
from deltackpt.holding import Slice
from deltackpt.publish import Publisher
from deltackpt.replica import Joint, Replica, classes, disagreement, shares
from deltackpt.slices import SliceTarget
from deltackpt.store import LocalStore, Store
from deltackpt.tensors import TensorTarget

pytest.importorskip("torch")

LONG_S = 3600.0
"""A lease for tests in which nobody dies: however slow a machine is, nobody is taken for dead."""


def weights(version: int) -> dict[str, Any]:
    """The tensors of a version. Element 0 of `a` changes in each."""
    rng = np.random.default_rng(version)
    a = np.arange(20_000, dtype=np.uint16)
    for v in range(1, version + 1):
        a[:: 50 + v] += v
    b = rng.integers(0, 256, 12, dtype=np.uint8)
    return {"a": tensor_of("BF16", (100, 200), a.tobytes()), "b": tensor_of("F32", (3,), b.tobytes())}


def raws(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {name: raw_of(tensor) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def tcp() -> Iterator[int]:
    """Port of a TCPStore for all tests; each uses its own prefix."""
    served = serve_tcp()
    yield served.port
    del served


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with versions 0, 1 and 2."""
    with Publisher(str(tmp_path / "store"), anchors=False, run_id="r") as publisher:
        for version in range(3):
            publisher.publish(weights(version))
    return tmp_path / "store"


class Rank:
    """A rank: live tensors at a version, its follower and its place in the group."""

    def __init__(
        self,
        store: Path | Store,
        group: Group,
        *,
        at: int = 0,
        wrap: Callable[[Board], Board] = lambda b: b,
        **limits: float,
    ) -> None:
        self.tensors = weights(at)
        self.target = TensorTarget(self.tensors)
        self.follower = Follower(LocalStore(store) if isinstance(store, Path) else store, self.target, threads=1)
        self.replica = Replica(self.follower, Group(group.rank, group.size, wrap(group.board), group.lease_s), **limits)

    def go(self, version: int | None = None) -> int:
        """Take part until a round has ended; returns the version."""
        joint = self.replica.prepare(version, wait_s=60.0)
        assert joint is not None
        return joint.apply()

    @property
    def holds(self) -> int:
        """The version whose bytes the tensors are."""
        return next(v for v in range(3) if raws(weights(v)) == raws(self.tensors))


class Ranks:
    """Makes groups on one board."""

    def __init__(self, port: int, store: Path) -> None:
        self.port, self.store, self.prefix, self.made = port, store, secrets.token_hex(6), list[Rank]()

    def group(self, rank: int, size: int, lease_s: float) -> Group:
        return Group.tcp("127.0.0.1", self.port, rank=rank, size=size, lease_s=lease_s, prefix=self.prefix)

    def make(self, rank: int, size: int, *, lease_s: float = LONG_S, store: Store | None = None, **more: Any) -> Rank:
        limits = {"stage_s": 60.0, "apply_s": 60.0} | more  # so that a test which fails ends
        made = Rank(self.store if store is None else store, self.group(rank, size, lease_s), **limits)
        self.made.append(made)
        return made


@pytest.fixture
def ranks(tcp: int, store: Path) -> Iterator[Ranks]:
    made = Ranks(tcp, store)
    yield made
    for rank in made.made:
        rank.replica.close()


def together(works: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run each in a thread of its own; returns results, or the errors of this package."""

    def caught(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (RankFailed, Fenced, Unavailable, ChainError) as exc:
            return exc

    works = list(works)
    with ThreadPoolExecutor(len(works)) as pool:
        return [f.result(timeout=120) for f in [pool.submit(caught, w) for w in works]]


# ---------------------------------------------------------------- all is well


def test_all_ranks_go_from_version_to_version(ranks: Ranks) -> None:
    group = [ranks.make(n, 3) for n in range(3)]
    assert together([r.go for r in group]) == [2, 2, 2]
    assert [r.holds for r in group] == [2, 2, 2]
    assert together([lambda r=r: r.go(1) for r in group]) == [1, 1, 1]
    assert [r.holds for r in group] == [1, 1, 1]
    assert together([lambda r=r: r.replica.prepare(1) for r in group]) == [None, None, None]


def test_first_rank_that_wants_something_decides_what(ranks: Ranks) -> None:
    group = [ranks.make(n, 3) for n in range(3)]
    board = group[0].replica.group.board

    def late(rank: Rank) -> int:
        while board.get("replica/0/goal") is None:
            time.sleep(0.01)
        return rank.go()

    assert together([lambda: group[0].go(1), lambda: late(group[1]), lambda: late(group[2])]) == [1, 1, 1]
    assert [r.holds for r in group] == [1, 1, 1]


def test_rank_that_is_there_already_takes_part(ranks: Ranks) -> None:
    group = [ranks.make(0, 2, at=2), ranks.make(1, 2, at=0)]
    joints = together([lambda r=r: r.replica.prepare(wait_s=60.0) for r in group])
    assert [j.prepared is None for j in joints] == [True, False]
    assert together([j.apply for j in joints]) == [2, 2]
    assert [r.holds for r in group] == [2, 2]


def test_one_rank_is_a_group(ranks: Ranks) -> None:
    only = ranks.make(0, 1)
    assert (only.go(), only.holds) == (2, 2)


def test_ranks_of_one_host_need_only_a_folder(store: Path, tmp_path: Path) -> None:
    boards = [StoreBoard(LocalStore(tmp_path / "meet"), "start1") for _ in range(2)]
    group = [Rank(store, Group(n, 2, board, LONG_S)) for n, board in enumerate(boards)]
    assert together([lambda r=r: r.go(1) for r in group]) == [1, 1]
    assert together([r.go for r in group]) == [2, 2]
    assert together([lambda r=r: r.go(0) for r in group]) == [0, 0]
    for rank in group:
        rank.replica.close()
    # What was said two rounds ago is gone; goals and ends of the last ones, members and beats are there.
    left = sorted(k.partition("/start1/replica/")[2] for k in LocalStore(tmp_path / "meet").keys("board/"))
    assert [k for k in left if k.startswith(("0/", "1/"))] == ["0/end", "1/end"]


# ---------------------------------------------------------------- P24: one rank fails


def flip(rank: Rank) -> None:
    """Change a bit of an element that every version changes, behind the target's back."""
    import torch

    rank.tensors["a"].view(torch.int16)[0, 0] ^= 1


def test_p24_rank_that_fails_to_apply_is_named_and_the_others_undo(ranks: Ranks) -> None:
    group = [ranks.make(n, 4) for n in range(4)]
    joints = together([lambda r=r: r.replica.prepare(1, wait_s=60.0) for r in group])
    flip(group[2])
    failed = together([j.apply for j in joints])
    assert [type(f) for f in failed] == [RankFailed] * 4
    assert len({str(f) for f in failed}) == 1
    assert str(failed[0]) == "rank 2: version 1: a did not change as published, all was undone; reseed"
    flip(group[2])
    assert [r.holds for r in group] == [0, 0, 0, 0]
    assert together([lambda r=r: r.go(1) for r in group]) == [1, 1, 1, 1]
    assert [r.holds for r in group] == [1, 1, 1, 1]


@pytest.mark.parametrize("error", [IntegrityError, NotFound, Unavailable, MemoryError])
def test_p24_rank_that_fails_to_stage_is_named_and_nobody_applies(ranks: Ranks, error: type[Exception]) -> None:
    broken = FaultStore(LocalStore(ranks.store), kinds=("read_into", "get"), error=lambda: error("no luck"))
    group = [ranks.make(0, 3), ranks.make(1, 3, store=broken), ranks.make(2, 3)]
    assert together([lambda r=r: r.replica.prepare(0) for r in group]) == [None, None, None]
    board = group[0].replica.group.board

    def fails() -> int:
        # When the others wait for it.
        while board.get("replica/0/staged/0") is None or board.get("replica/0/staged/2") is None:
            time.sleep(0.01)
        broken.at = len(broken.operations) + 1
        return group[1].go()

    def stage(rank: Rank) -> Any:
        return rank.replica.prepare(1, wait_s=60.0)

    failed = together([lambda: stage(group[0]), fails, lambda: stage(group[2])])
    assert [type(f) for f in failed] == [RankFailed] * 3
    assert all(str(f).startswith("rank 1: ") and "no luck" in str(f) for f in failed)
    assert [r.holds for r in group] == [0, 0, 0]
    broken.at = None
    assert together([lambda r=r: r.go(1) for r in group]) == [1, 1, 1]


def test_version_that_is_not_there_is_refused_without_a_round(ranks: Ranks) -> None:
    rank = ranks.make(0, 2)
    with pytest.raises(ChainError, match="version 9 is not in the store"):
        rank.replica.prepare(9)
    assert rank.replica.group.board.get("replica/0/goal") is None


def test_folder_is_refused(store: Path, tmp_path: Path) -> None:
    follower = Follower(LocalStore(store), CheckpointTarget(str(tmp_path / "dest")))
    with pytest.raises(ConfigError, match="a CheckpointTarget cannot be taken back"):
        Replica(follower, Group(0, 1, StoreBoard(LocalStore(tmp_path / "meet"), "s")))


def test_rank_that_does_not_apply_lets_nobody_apply(ranks: Ranks) -> None:
    group = [ranks.make(n, 2) for n in range(2)]
    joints = together([lambda r=r: r.replica.prepare(1, wait_s=60.0) for r in group])
    failed, _ = together([joints[0].apply, joints[1].discard])
    assert str(failed) == "rank 1: it did not apply version 1"
    assert [r.holds for r in group] == [0, 0]
    assert together([lambda r=r: r.go(1) for r in group]) == [1, 1]


def test_rank_that_lives_and_does_not_come_is_named(ranks: Ranks) -> None:
    group = [ranks.make(0, 2, stage_s=0.1, apply_s=0.1), ranks.make(1, 2)]
    with pytest.raises(RankFailed, match=r"^rank 1: it lives, but has not staged version 1 in 0\.1 s$"):
        group[0].replica.prepare(1, wait_s=60.0)
    group[0].replica._limits["staged"] = LONG_S
    joints = together([lambda r=r: r.replica.prepare(1, wait_s=60.0) for r in group])
    with pytest.raises(RankFailed, match=r"^rank 1: it lives, but has not applied version 1 in 0\.1 s$"):
        joints[0].apply()
    # It comes late, and finds that it has to stay.
    with pytest.raises(RankFailed, match=r"^rank 1: it lives, but"):
        joints[1].apply()
    assert [r.holds for r in group] == [0, 0]


def test_rank_that_never_came_is_named(ranks: Ranks) -> None:
    alone = ranks.make(0, 2, lease_s=0.4)
    with pytest.raises(RankFailed, match=r"^rank 1: no sign of life for 0\.4 s; start it again$"):
        alone.replica.prepare(wait_s=60.0)
    assert alone.holds == 0


def test_rank_that_was_reseeded_and_has_to_go_back_is_reseeded_again(ranks: Ranks) -> None:
    group = [ranks.make(n, 3) for n in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group[0].target, "_poisoned", True)
        joints = together([lambda r=r: r.replica.prepare(1, wait_s=60.0) for r in group])
    flip(group[2])
    failed = together([j.apply for j in joints])
    assert [str(f)[:7] for f in failed] == ["rank 2:"] * 3
    assert group[1].holds == 0
    flip(group[2])
    assert together([lambda r=r: r.go(1) for r in group]) == [1, 1, 1]
    assert [r.holds for r in group] == [1, 1, 1]


# ---------------------------------------------------------------- a rank dies, anywhere


class Died(BaseException):
    """Ends a rank's thread as death would."""


class Mortal:
    """The board of a rank that dies at its n-th call, before or after it. Beats end with it; they count for nothing.

    key: it dies when it has made this one.
    """

    def __init__(self, board: Board, at: int, when: str, *, key: str = "") -> None:
        self.board, self.poll_s, self.at, self.when, self.key, self.calls = board, board.poll_s, at, when, key, 0

    def _call(self, work: Callable[[], Any]) -> Any:
        if threading.current_thread().name == "deltackpt-pulse":
            if self.calls >= self.at:
                raise Unavailable("dead")
            return work()
        self.calls += 1
        if self.calls == self.at and self.when == "before":
            raise Died
        result = work()
        if self.calls >= self.at:
            raise Died
        return result

    def create(self, key: str, value: bytes) -> bytes:
        found: bytes = self._call(lambda: self.board.create(key, value))
        if key == self.key:
            raise Died
        return found

    def put(self, key: str, value: bytes) -> None:
        self._call(lambda: self.board.put(key, value))

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._call(lambda: self.board.get(key))
        return found

    def drop(self, keys: Iterable[str]) -> None:
        self._call(lambda: self.board.drop(keys))


def live_and_die(ranks: Ranks, at: int, when: str) -> int | None:
    """Rank 1 of 3 dies at its n-th call. The others end at one version, and all at the new one when it is back.

    Returns the version at which the others were left; None if rank 1 outlived the round.
    """
    ranks.prefix = secrets.token_hex(6)
    lease_s = 0.3
    survivors = [ranks.make(n, 3, lease_s=lease_s, stage_s=5.0, apply_s=5.0) for n in (0, 2)]
    lived = False

    def dies() -> None:
        nonlocal lived
        with contextlib.suppress(Died):
            ranks.make(1, 3, lease_s=lease_s, wrap=lambda board: Mortal(board, at, when)).go(1)
            lived = True

    first, _, second = together([lambda: survivors[0].go(1), dies, lambda: survivors[1].go(1)])
    left = survivors[0].holds
    assert survivors[1].holds == left
    if not lived:
        assert (first, second) == (1, 1) if left == 1 else (type(first), type(second)) == (RankFailed, RankFailed)
    back = ranks.make(1, 3, lease_s=LONG_S)
    everybody = [survivors[0], back, survivors[1]]
    done = threading.Event()

    until = time.monotonic() + 100

    def climb(rank: Rank) -> None:
        while not done.is_set() and time.monotonic() < until:
            with contextlib.suppress(RankFailed):
                joint = rank.replica.prepare(1, wait_s=0.05)
                if joint is not None:
                    joint.apply()
            if all(r.target._version == 1 for r in everybody):
                done.set()

    together([lambda r=r: climb(r) for r in everybody])
    assert [r.holds for r in everybody] == [1, 1, 1]
    return None if lived else left


@pytest.mark.parametrize("when", ["before", "after"])
def test_rank_that_dies_at_any_call_leaves_the_others_at_one_version_and_comes_back(ranks: Ranks, when: str) -> None:
    left = []
    at = 1
    while (found := live_and_die(ranks, at, when)) is not None:
        left.append(found)
        at += 1
    assert len(left) > 10
    assert 0 in left


def test_rank_that_dies_when_it_has_said_that_it_applied_keeps_nobody_back(ranks: Ranks) -> None:
    group = [ranks.make(n, 3) for n in (0, 2)]

    def dies() -> None:
        with contextlib.suppress(Died):
            ranks.make(1, 3, wrap=lambda board: Mortal(board, 1 << 30, "after", key="replica/0/applied/1")).go(1)

    assert together([lambda: group[0].go(1), dies, lambda: group[1].go(1)]) == [1, None, 1]
    assert [r.holds for r in group] == [1, 1]


def test_process_that_was_replaced_stops(ranks: Ranks) -> None:
    old, other = ranks.make(0, 2), ranks.make(1, 2)
    joints = together([lambda r=r: r.replica.prepare(1, wait_s=60.0) for r in (old, other)])
    new = ranks.make(0, 2)
    found = together([joints[1].apply, lambda: new.replica.prepare(1, wait_s=60.0)])
    assert [str(f) for f in found] == ["rank 0: it was started again in the middle of a round"] * 2
    with pytest.raises(RankFailed, match="started again"):
        joints[0].apply()
    with pytest.raises(Fenced, match="another process has taken the place of rank 0"):
        old.replica.prepare(1)
    assert [r.holds for r in (old, other, new)] == [0, 0, 0]
    assert together([lambda r=r: r.go(1) for r in (new, other)]) == [1, 1]


def test_board_that_is_lost_before_the_decision_is_settled_when_it_is_back(ranks: Ranks) -> None:
    class Cut:
        """A board that can be cut off."""

        def __init__(self, board: Board) -> None:
            self.board, self.poll_s, self.lost = board, board.poll_s, False

        def __getattr__(self, name: str) -> Any:
            if self.lost:
                raise Unavailable("cut off")
            return getattr(self.board, name)

    cuts: list[Cut] = []

    def cut(board: Board) -> Board:
        cuts.append(Cut(board))
        return cuts[-1]  # type: ignore[return-value]  # by __getattr__

    group = [ranks.make(0, 2, wrap=cut), ranks.make(1, 2)]
    joints = together([lambda r=r: r.replica.prepare(1, wait_s=60.0) for r in group])

    class Cutting:
        """Cuts the board off when the apply is done."""

        def __init__(self, staging: Any) -> None:
            self.staging = staging

        def apply(self) -> None:
            self.staging.apply()
            cuts[0].lost = True

        def __getattr__(self, name: str) -> Any:
            return getattr(self.staging, name)

    object.__setattr__(joints[0].prepared, "staging", Cutting(joints[0].prepared.staging))
    with pytest.raises(Unavailable, match="cut off"):
        joints[0].apply()
    assert group[0].holds == 1
    cuts[0].lost = False
    failed = together([lambda: group[0].replica.prepare(1, wait_s=60.0), joints[1].apply])
    assert [str(f) for f in failed] == ["rank 0: it was interrupted while it waited for the decision"] * 2
    assert [r.holds for r in group] == [0, 0]
    assert together([lambda r=r: r.go(1) for r in group]) == [1, 1]


# ---------------------------------------------------------------- real processes

_PROCESSES = """
# Ranks in children of a process that has imported everything: a tenth of an interpreter each.
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_replica import Rank
from deltackpt.board import Group, StoreBoard
from deltackpt.errors import RankFailed
from deltackpt.store import LocalStore

def rank(number, meet, dies=""):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, os.fdopen(reading)
    try:
        out = os.fdopen(writing, "w", buffering=1)
        me = Rank(Path(sys.argv[2]), Group(number, 3, StoreBoard(LocalStore(meet), "s"), 3.0))
        sums = me.target.sums
        def die(reader):
            os.kill(os.getpid(), getattr(signal, dies))
            return sums(reader)
        if dies:
            me.target.sums = die
        while me.target._version != 2:
            try:
                joint = me.replica.prepare(wait_s=0.2)
                if joint is not None:
                    joint.apply()
            except RankFailed as exc:
                print(json.dumps([str(exc), me.holds]), file=out)
        print(json.dumps(["done", me.holds]), file=out)
    finally:
        os._exit(0)

for dies in ("SIGKILL", "SIGSTOP"):
    meet = f"{sys.argv[3]}-{dies}"
    ranks = [rank(0, meet), rank(1, meet, dies), rank(2, meet)]
    first = []
    for _, out in (ranks[0], ranks[2]):
        # On a slow machine another rank may be taken for dead first; all are at one version then too.
        while not (line := json.loads(out.readline()))[0].startswith("rank 1: no sign"):
            assert line[1] == 0, line
        first.append(line)
    ranks.append(rank(1, meet))
    last = [json.loads(ranks[n][1].readlines()[-1]) for n in (0, 2, 3)]
    for pid, _ in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(json.dumps([first, last]), flush=True)
"""


def test_process_that_is_killed_or_stopped_after_its_apply_is_named_and_comes_back(store: Path, tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", _PROCESSES, here, str(store), str(tmp_path / "meet")],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    named = ["rank 1: no sign of life for 3 s; start it again", 0]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers == [[[named, named], [["done", 2]] * 3]] * 2


# ---------------------------------------------------------------- the fingerprint of a group

U = np.uint64


def said(held: list[list[int]], sums: list[list[int]]) -> list[dict[str, str]]:
    kinds = classes([np.array(h, U) for h in held])
    return [shares(kind, np.array(s, U)) for kind, s in zip(kinds, sums, strict=True)]


def test_boxes_of_several_ranks_count_once() -> None:
    """Two ranks hold a half each and share the norms: 3 + 5 + 7 + 11."""
    found = said([[1, 2, 9], [9, 3]], [[3, 5, 11], [11, 7]])
    assert [len(one) for one in found] == [2, 2]
    assert disagreement(found, f"{26:016x}") == ""


def test_sums_wrap_around() -> None:
    found = said([[1], [2]], [[(1 << 64) - 1], [3]])
    assert disagreement(found, f"{2:016x}") == ""


def test_wrong_copy_of_a_shared_box_names_its_rank() -> None:
    found = said([[1, 9], [2, 9], [3, 9]], [[3, 11], [5, 12], [7, 11]])
    assert disagreement(found, f"{26:016x}") == "rank 1: other weights than on the ranks that hold the same part"


def test_two_copies_that_differ_name_both_ranks() -> None:
    found = said([[9], [9]], [[11], [12]])
    assert disagreement(found, f"{11:016x}") == "rank 0, 1: other weights than on the ranks that hold the same part"


def test_part_that_no_rank_holds_is_missed() -> None:
    found = said([[1], [2]], [[3], [5]])
    assert disagreement(found, f"{15:016x}") == (
        "ranks 0 to 1: their parts make the state 0000000000000008, the version's is 000000000000000f; "
        "they hold other weights than they should, or not every part of the model"
    )


def test_rank_that_holds_nothing_adds_nothing() -> None:
    found = said([[1, 2], []], [[3, 5], []])
    assert found[1] == {}
    assert disagreement(found, f"{8:016x}") == ""


def test_group_whose_sum_is_not_the_state_goes_back(ranks: Ranks) -> None:
    group = [ranks.make(n, 2) for n in range(2)]
    joints: list[Joint] = together([lambda r=r: r.replica.prepare(1, wait_s=60.0) for r in group])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group[1].target, "sums", lambda reader: np.array([5], U))
        failed = together([j.apply for j in joints])
    assert [str(f) for f in failed] == ["rank 0, 1: other weights than on the ranks that hold the same part"] * 2
    assert [r.holds for r in group] == [0, 0]
    assert together([lambda r=r: r.go(1) for r in group]) == [1, 1]


# ---------------------------------------------------------------- slices


class Halves:
    """Two ranks that each hold half of the columns of `a`, and all of `b`."""

    def __init__(self, ranks: Ranks) -> None:
        self.held = [self.of(0, rank) for rank in range(2)]
        self.replicas = [
            Replica(
                Follower(LocalStore(ranks.store), SliceTarget(self.slices(rank), version=0), threads=1),
                ranks.group(rank, 2, LONG_S),
            )
            for rank in range(2)
        ]

    @staticmethod
    def of(version: int, rank: int) -> dict[str, Any]:
        whole = weights(version)
        return {"a": whole["a"][:, 100 * rank : 100 * rank + 100].clone(), "b": whole["b"].clone()}

    def slices(self, rank: int) -> list[Slice]:
        a, b = self.held[rank]["a"], self.held[rank]["b"]
        return [Slice("a", (100, 200), ((0, 100), (100 * rank, 100 * rank + 100)), a), Slice("b", (3,), ((0, 3),), b)]

    def go(self, version: int) -> list[Any]:
        """Bring both ranks to a version."""

        def one(replica: Replica) -> int:
            joint = replica.prepare(version, wait_s=60.0)
            assert joint is not None
            return joint.apply()

        return together([lambda r=r: one(r) for r in self.replicas])

    @property
    def holds(self) -> list[int]:
        """The version whose bytes each rank holds."""
        return [next(v for v in range(3) if raws(self.of(v, rank)) == raws(self.held[rank])) for rank in range(2)]


@pytest.fixture
def halves(ranks: Ranks) -> Iterator[Halves]:
    made = Halves(ranks)
    yield made
    for replica in made.replicas:
        replica.close()


def test_halves_of_a_tensor_add_up_to_the_state_of_each_version(halves: Halves) -> None:
    assert halves.go(2) == [2, 2]
    assert halves.holds == [2, 2]
    assert halves.go(1) == [1, 1]
    assert halves.holds == [1, 1]


def test_wrong_bit_in_a_slice_that_no_rank_can_see_alone_is_seen_by_the_sum(halves: Halves) -> None:
    import torch

    halves.held[1]["a"].view(torch.int16)[99, 99] ^= 1 << 14
    failed = halves.go(1)
    assert [type(f) for f in failed] == [RankFailed] * 2
    assert all("their parts make the state" in str(f) for f in failed)
    halves.held[1]["a"].view(torch.int16)[99, 99] ^= 1 << 14
    assert halves.holds == [0, 0]
