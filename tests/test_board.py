"""Boards and rounds: one winner per key, bounded answers, and who is out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deltackpt.board import (
    Board,
    Forgotten,
    Group,
    Round,
    StoreBoard,
    TcpBoard,
    Trouble,
    Watch,
    serve_tcp,
    sweep_boards,
)
from deltackpt.errors import ConfigError, Unavailable
from deltackpt.store import LocalStore


@pytest.fixture(params=["tcp", "store"])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Board:
    if request.param == "tcp":
        return TcpBoard(serve_tcp())
    return StoreBoard(LocalStore(tmp_path), "session-1")


def test_a_key_is_created_once(board: Board) -> None:
    assert board.get("r0/plan") is None
    assert board.create("r0/plan", b"first\0\xff") == b"first\0\xff"
    assert board.create("r0/plan", b"second") == b"first\0\xff"
    assert board.get("r0/plan") == b"first\0\xff"
    board.drop(["r0/plan", "r0/none"])
    assert board.get("r0/plan") is None


def test_a_key_that_is_put_has_the_last_value(board: Board) -> None:
    board.put("r0/steps/1", b"1")
    board.put("r0/steps/1", b"2")
    assert board.get("r0/steps/1") == b"2"


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def rounds(board: Board) -> tuple[Callable[[int], Round], Clock]:
    clock = Clock()
    return lambda rank: Round(Watch(Group(rank, 3, board, 10.0), board, clock=clock), 0), clock


def test_a_rank_is_out_when_its_steps_stand_still_for_a_lease(rounds: tuple[Callable[[int], Round], Clock]) -> None:
    make, clock = rounds
    zero, one = make(0), make(1)
    one.step()
    assert not zero.out(1)
    clock.now += 9.0
    one.step()
    assert not zero.out(1)
    clock.now += 9.0
    assert not zero.out(1)
    clock.now += 1.0
    assert zero.out(1)
    one.step()
    clock.now += 1.0
    assert not zero.out(1)


def test_a_rank_that_says_so_is_out_at_once(rounds: tuple[Callable[[int], Round], Clock]) -> None:
    make, _ = rounds
    one, two = make(1), make(2)
    one.fail(Trouble("StoreError", "no space"))
    assert not two.out(1)
    assert str(two.failed(1)) == "Trouble(kind='StoreError', text='no space', gone=False)"
    assert not two.turn((1, 0, 2))  # rank 0 may do it
    make(0).fail(Trouble("Unavailable", "interrupted", gone=True))
    assert two.turn((1, 0, 2))


def test_the_first_rank_that_is_not_out_leads(rounds: tuple[Callable[[int], Round], Clock]) -> None:
    make, clock = rounds
    one = make(1)
    assert not one.leads((0, 1, 2))
    clock.now += 10.0
    assert one.leads((0, 1, 2))
    # One that is not among them leads when all of them are out.
    assert not one.leads((0, 2))
    clock.now += 10.0
    assert one.leads((0, 2))


def test_ranks_that_die_together_are_found_out_in_one_lease(rounds: tuple[Callable[[int], Round], Clock]) -> None:
    """Each was looked at only when the one before it was out: two deaths cost two leases."""
    make, clock = rounds
    two = make(2)
    assert not two.leads((0, 1, 2))
    assert not two.turn((1, 0, 2))
    clock.now += 10.0
    assert two.leads((0, 1, 2))
    assert two.turn((1, 0, 2))


def test_a_rank_that_is_out_stays_out_in_later_rounds_until_it_counts(board: Board) -> None:
    """A death was waited for again by the plan of the next round."""
    clock = Clock()
    zero, one, two = (Watch(Group(rank, 3, board, 10.0), board, clock=clock) for rank in range(3))
    round_, late, other = Round(zero, 0), Round(one, 0), Round(two, 0)
    assert not round_.out(1)
    assert not round_.out(2)
    clock.now += 9.0
    other.step()
    assert not round_.out(2)
    clock.now += 1.0
    assert round_.out(1)
    clock.now += 1000.0  # between rounds nobody counts
    after = Round(zero, 1)
    assert after.out(1)
    assert not after.out(2)
    late.step()  # it woke up, and is still in the round before
    clock.now += 1.0
    assert not after.out(1)


def test_a_rank_that_went_on_to_a_later_round_is_out_in_this_one(board: Board) -> None:
    clock = Clock()
    zero, one = (Watch(Group(rank, 2, board, 10.0), board, clock=clock) for rank in range(2))
    round_, other = Round(zero, 0), Round(one, 5)
    for _ in range(10):
        other.step()
        assert not round_.out(1)
        clock.now += 1.0
    assert round_.out(1)


def test_a_round_that_was_forgotten_decides_nothing_any_more(board: Board) -> None:
    """A rank that slept while the others went on and dropped a decision made one of its own, and removed its shards."""
    clock = Clock()
    zero, one = (Watch(Group(rank, 2, board, 10.0), board, clock=clock) for rank in range(2))
    round_, late = Round(zero, 0), Round(one, 0)
    assert round_.decided("decision", (0, 1), lambda: b"commit") == b"commit"
    assert late.decided("decision", (0, 1), lambda: b"fail") == b"commit"
    round_.forget()
    assert not late.leads((0, 1))
    clock.now += 10.0
    with pytest.raises(Forgotten):
        late.decided("decision", (0, 1), lambda: b"fail")
    assert late.get("decision") is None


def test_a_decision_that_was_made_as_a_round_was_forgotten_does_not_count(board: Board) -> None:
    zero, one = (Watch(Group(rank, 2, board, 10.0), board) for rank in range(2))
    round_, late = Round(zero, 0), Round(one, 0)

    def decide() -> bytes:
        late.forget()
        return b"fail"

    with pytest.raises(Forgotten):
        round_.decided("decision", (0, 1), decide)


def test_a_stopped_host_of_a_tcp_store_is_an_error_within_the_bound() -> None:
    read, write = os.pipe()
    host = os.fork()
    if host == 0:
        served = serve_tcp()
        os.write(write, b"%d\n" % served.port)
        time.sleep(60)
        os._exit(0)
    try:
        board = Group.tcp("127.0.0.1", int(os.read(read, 16)), rank=0, size=1, lease_s=1.0).board
        board.put("a", b"1")
        os.kill(host, signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"the group's TCPStore is lost \(no answer in 1 s\)"):
                board.get("a")
    finally:
        os.kill(host, signal.SIGKILL)
        os.waitpid(host, 0)
        os.close(read)
        os.close(write)


def test_sessions_of_groups_that_are_gone_are_swept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    StoreBoard(store, "old").put("a", b"1")
    new = StoreBoard(store, "new")
    new.put("a", b"2")
    sweep_boards(store, "new")
    assert list(store.keys("board/")) == ["board/new/a"]


@pytest.mark.parametrize("session", ["", "..", "a/b", "a b"])
def test_a_session_must_be_a_plain_word(tmp_path: Path, session: str) -> None:
    with pytest.raises(ConfigError, match="session"):
        StoreBoard(LocalStore(tmp_path), session)
