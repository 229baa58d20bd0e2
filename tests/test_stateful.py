"""Publish, pull, crash, anchor, rewind, lose data and restart in any order, against a plain dict of weights."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import make_cases
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_crash import Breaker, DyingStore, Killed

from deltackpt.anchor import make_anchor
from deltackpt.errors import ChainError, DeltaError, NotFound
from deltackpt.folder import CheckpointTarget, read_record
from deltackpt.follow import Follower
from deltackpt.publish import Publisher, publish_folder
from deltackpt.reader import Reader
from deltackpt.store import LocalStore
from deltackpt.verify import verify_folder, verify_store

Mode = Literal["replace", "switch", "in-place"]
MODES: tuple[Mode, ...] = ("replace", "switch", "in-place")
Weights = dict[str, bytes]

modes = st.sampled_from(MODES)
ways = st.sampled_from(["no space", "no answer", "outage", "kill"])
moments = st.sampled_from(["before", "after"])
numbers = st.integers(1, 30)
seeds = st.integers(0, 2**32 - 1)


class Machine(RuleBasedStateMachine):
    """One store, one trainer, and a target of each mode."""

    def __init__(self) -> None:
        super().__init__()
        self.patched = pytest.MonkeyPatch()
        self.root = Path(tempfile.mkdtemp(prefix="deltackpt-stateful-"))
        self.url = str(self.root / "store")
        self.store = DyingStore(LocalStore(self.url))
        self.patched.setenv("XDG_STATE_HOME", str(self.root / "state"))
        self.patched.setattr("deltackpt.writer.time.sleep", lambda _: None)
        self.patched.setattr(os, "fsync", lambda _: None)
        for module in ("publish", "anchor", "follow"):
            self.patched.setattr(f"deltackpt.{module}.open_store", lambda _: self.store)
        self.breaker = Breaker()
        self.breaker.install(self.patched)
        self.weights: dict[int, Weights] = {}
        self.now: Weights = {
            "a": np.arange(200, dtype="<u2").tobytes(),
            "b": np.linspace(0, 1, 24, dtype="<f4").tobytes(),
        }
        self.rewinds: dict[int, int] = {}
        self.gone: set[int] = set()
        self.followers: dict[Mode, Follower] = {}

    def teardown(self) -> None:
        self.breaker.active = False
        for follower in self.followers.values():
            follower.close()
        self.patched.undo()
        shutil.rmtree(self.root)

    # ------------------------------------------------------------ the trainer

    def checkpoint(self, weights: Weights) -> str:
        files = {
            make_cases.shard_name(1, 2): [("a", "U16", (200,), weights["a"])],
            make_cases.shard_name(2, 2): [("b", "F32", (4, 6), weights["b"])],
        }
        shutil.rmtree(self.root / "checkpoint", ignore_errors=True)
        return str(make_cases.write_ckpt(self.root / "checkpoint", files))

    def train(self, seed: int) -> None:
        """Change some elements; with every fourth seed none."""
        rng = np.random.default_rng(seed)
        if seed % 4:
            a, b = bytearray(self.now["a"]), bytearray(self.now["b"])
            for _ in range(seed % 7):
                a[rng.integers(len(a))] ^= int(rng.integers(1, 256))
            b[rng.integers(len(b))] ^= 1
            self.now = {"a": bytes(a), "b": bytes(b)}

    def look(self, published: Weights) -> None:
        """Take note of the versions that came; what claims an epoch or goes back says so."""
        reader = Reader(LocalStore(self.url))
        reader.load()
        for version in range(len(self.weights), len(reader.history)):
            manifest = reader.manifest(version)
            if manifest.kind in ("empty", "rewind"):
                assert manifest.base is not None
                self.weights[version] = self.weights[manifest.base]
                if manifest.kind == "rewind":
                    self.rewinds[version] = manifest.base
            else:
                self.weights[version] = published
        assert len(self.weights) == len(reader.history)

    def publish_tensors(self, weights: Weights) -> None:
        with Publisher(self.url, anchors=False) as publisher:
            publisher.publish(
                {"a": np.frombuffer(weights["a"], "<u2"), "b": np.frombuffer(weights["b"], "<f4").reshape(4, 6)}
            )

    @initialize()
    def begin(self) -> None:
        publish_folder(self.checkpoint(self.now), self.url, anchors=False)
        self.look(self.now)

    @rule(seed=seeds, tensors=st.booleans(), number=st.none() | numbers, when=moments, way=ways)
    def publish(self, seed: int, tensors: bool, number: int | None, when: Any, way: Any) -> None:
        if way == "no space":
            when = "before"  # a store that refuses has not written
        self.train(seed)
        path = self.checkpoint(self.now)
        self.store.arm(number, when, way)
        done = False
        with contextlib.suppress(DeltaError, Killed):
            if tensors:
                self.publish_tensors(self.now)
            else:
                publish_folder(path, self.url, anchors=False)
            done = True
        self.store.heal()
        self.look(self.now)
        if done:
            assert self.weights[max(self.weights)] == self.now

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(set(self.weights) - self.gone)))
        self.now = self.weights[version]
        publish_folder(self.checkpoint(self.now), self.url, resume=True, anchors=False)
        self.look(self.now)
        assert self.weights[max(self.weights)] == self.now

    @rule(number=st.none() | numbers, when=moments, way=ways)
    def anchor(self, number: int | None, when: Any, way: Any) -> None:
        if way == "no space":
            when = "before"
        self.store.arm(number, when, way)
        with contextlib.suppress(DeltaError, Killed):
            make_anchor(self.url, max(self.weights))
        self.store.heal()

    @precondition(lambda self: any((self.root / "store" / "anchors").glob("*.json")))
    @rule()
    def lose(self) -> None:
        """Delete all data of the versions before the newest anchor, if none after it goes back to them."""
        newest = max(int(p.stem) for p in (self.root / "store" / "anchors").glob("*.json"))
        if any(base < newest <= version for version, base in self.rewinds.items()):
            return
        for path in (self.root / "store" / "data").iterdir():
            if int(path.name[:20]) < newest:
                shutil.rmtree(path)
        self.gone |= set(range(newest))

    # ------------------------------------------------------------ the targets

    def path(self, mode: Mode) -> Path:
        return self.root / mode

    def follower(self, mode: Mode) -> Follower:
        if mode not in self.followers:
            self.followers[mode] = Follower(self.url, CheckpointTarget(self.path(mode), mode=mode))
        return self.followers[mode]

    def pull(self, mode: Mode, version: int | None) -> None:
        follower = self.follower(mode)
        prepared = follower.prepare(version)
        if prepared is not None:
            prepared.apply()

    @rule(mode=modes, data=st.data())
    def pull_any(self, mode: Mode, data: st.DataObject) -> None:
        """Any version is reached exactly, or refused where its data is gone."""
        version = data.draw(st.sampled_from(sorted(self.weights)))
        try:
            self.pull(mode, version)
        except (ChainError, NotFound):
            assert self.gone
        else:
            assert self.held(mode) == self.weights[version]

    @rule(mode=modes)
    def pull_newest(self, mode: Mode) -> None:
        self.pull(mode, None)
        assert self.held(mode) == self.weights[max(self.weights)]

    @rule(mode=modes, number=numbers, when=moments, way=st.sampled_from([None, errno.EIO, errno.ENOSPC]))
    def pull_and_fail(self, mode: Mode, number: int, when: str, way: int | None) -> None:
        self.breaker.number, self.breaker.when, self.breaker.way = number, when, way
        self.breaker.operations, self.breaker.dead = [], False
        with self.breaker.at_work(), contextlib.suppress(DeltaError, Killed):
            self.pull(mode, None)
        if self.breaker.dead:
            self.restart(mode)

    @rule(mode=modes)
    def restart(self, mode: Mode) -> None:
        """The sampler's process ends, whatever it was at, and another one takes over."""
        if mode in self.followers:
            target = self.followers.pop(mode).target
            assert isinstance(target, CheckpointTarget)
            if target._lock is not None:
                os.close(target._lock)
                target._lock = None

    # ------------------------------------------------------------ what always holds

    def held(self, mode: Mode) -> Weights:
        path = self.path(mode)
        found = make_cases.read_ckpt(path / "current" if mode == "switch" else path)
        return {name: raw for name, (_, _, raw) in found.items()}

    @invariant()
    def every_target_is_a_version_or_says_that_it_is_none(self) -> None:
        for mode in MODES:
            path = self.path(mode)
            outer = read_record(str(path))
            inner = read_record(str(path / "current")) if mode == "switch" else outer
            if outer is not None and outer.pending is not None:
                assert any(p.exit_code == 50 for p in verify_folder(path, LocalStore(self.url)).problems)
            elif inner is not None:
                assert self.held(mode) == self.weights[inner.version]

    @invariant()
    def what_is_left_of_the_store_is_whole(self) -> None:
        if self.weights and not self.gone:
            assert verify_store(LocalStore(self.url)).problems == ()


TestStateful = pytest.mark.filterwarnings("error")(Machine.TestCase)
TestStateful.settings = settings(max_examples=30, stateful_step_count=30)
