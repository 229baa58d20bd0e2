"""Publish and pull are interrupted at every operation, before and after it, by errors and by death.

Store operations are counted by a store that fails, operations on a target by replaced functions of `os`. What must
hold: a manifest implies all its shards; readers see the old version or the new one, whole; a publisher's next version
is exact, whatever became of the last one; a target is the old version, or the new one, or dirty and saying so, and the
next plain pull makes it whole.

Every interruption is made. Many of them leave the same bytes on the disk, and as names are drawn by counting and the
clock stands still, the same bytes lead to the same end: what follows is gone through once for each state that is left.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import make_cases
import numpy as np
import pytest
from faults import FaultStore
from helpers import State, cli_run, state_of

from deltackpt.anchor import make_anchor
from deltackpt.checkpoint import open_folder
from deltackpt.errors import DeltaError, StoreError, Unavailable
from deltackpt.folder import CheckpointTarget, read_record
from deltackpt.follow import Follower
from deltackpt.publish import Publisher, publish_folder
from deltackpt.store import LocalStore
from deltackpt.verify import verify_folder, verify_store

Digest = dict[str, list[Any]]


@dataclass
class Names:
    """Stands for `secrets.token_hex`: draws by counting. The same work gets the same names after `again`."""

    drawn: Iterator[int] = field(default_factory=itertools.count)

    def again(self, begin: int) -> Iterator[int]:
        """Count from here on; returns what it would have drawn."""
        before, self.drawn = self.drawn, itertools.count(begin)
        return before

    def token_hex(self, nbytes: int) -> str:
        return f"{next(self.drawn):0{2 * nbytes}x}"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Names by counting, and clocks that stand still."""
    made, now = Names(), time.time()
    monkeypatch.setattr("secrets.token_hex", made.token_hex)
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    return made


class Killed(BaseException):
    """Stands for SIGKILL: nobody handles it, and nothing may happen after it."""


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    """Name the place of the interruption in a failure."""
    try:
        yield
    except Exception as exc:
        raise AssertionError(f"{where}: {exc!r}") from exc


# ---------------------------------------------------------------- a store that fails

Kind = Literal["no space", "no answer", "outage", "filled", "kill"]


class DyingStore(FaultStore):
    """Fails at the n-th operation from `arm` on, in one of five ways.

    no space and no answer: once. outage: nothing is answered from then on, until `heal`. filled: no answer, and then
    there is no space for anything more. kill: the process dies.
    """

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store, error=self._raise)  # type: ignore[arg-type]  # one is not an Exception
        self.way: Kind = "kill"
        self.over: Kind | None = None

    def arm(self, number: int | None, when: Literal["before", "after"], way: Kind) -> None:
        self.at, self.when, self.way = number, when, way
        self.operations.clear()

    def heal(self) -> None:
        self.at, self.over = None, None

    def _raise(self) -> BaseException:
        if self.way in ("outage", "filled", "kill"):
            self.over = self.way
        return self._error(self.way)

    @staticmethod
    def _error(way: Kind) -> BaseException:
        if way == "kill":
            return Killed()
        return StoreError("injected: no space") if way == "no space" else Unavailable("injected: no answer")

    def _run(self, kind: str, key: str, work: Callable[[], Any]) -> Any:
        if self.over == "filled" and kind == "put":
            raise self._error("no space")
        if self.over in ("outage", "kill"):
            raise self._error(self.over)
        return super()._run(kind, key, work)


def places(operations: list[str]) -> Iterator[tuple[int, Literal["before", "after"], Kind]]:
    """Yield all interruptions of a run. A read changes nothing, so its lost answer is like no answer at all."""
    for number, operation in enumerate(operations, 1):
        yield number, "before", "no answer"
        if operation.startswith(("put", "delete")):
            # A store that refuses has not written: only answers get lost after it.
            yield number, "before", "outage"
            yield number, "before", "no space"
            yield number, "before", "kill"
            yield number, "after", "kill"
            yield number, "after", "no answer"
            yield number, "after", "outage"
            yield number, "after", "filled"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here survives only by what a disk has: processes die, machines do not."""
    monkeypatch.setattr("deltackpt.writer.time.sleep", lambda _: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@dataclass
class Case:
    """One run: a copy of a prepared store, with the host's records, behind a store that fails."""

    root: Path
    store: DyingStore = field(init=False)

    def __post_init__(self) -> None:
        self.store = DyingStore(LocalStore(self.url))

    @property
    def url(self) -> str:
        return str(self.root / "store")


class Bench:
    """Makes copies of a prepared folder and lets the package see their failing stores."""

    def __init__(self, root: Path, names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
        self.template, self.copies, self.monkeypatch = root / "template", root / "copies", monkeypatch
        self.names, self.count = names, 0
        self.looks: dict[State, tuple[int | None, Digest | None]] = {}
        self.template.mkdir()
        self.copies.mkdir()
        self.use(self.template)

    def use(self, root: Path) -> Case:
        case = Case(root)
        self.monkeypatch.setenv("XDG_STATE_HOME", str(root / "state"))
        for module in ("publish", "anchor", "follow"):
            self.monkeypatch.setattr(f"deltackpt.{module}.open_store", lambda url, case=case: case.store)
        return case

    def copy(self) -> Case:
        self.count += 1
        shutil.rmtree(self.copies / str(self.count - 1), ignore_errors=True)
        # Above all names in the template.
        self.names.again(1 << 16)
        return self.use(Path(shutil.copytree(self.template, self.copies / str(self.count))))

    def look(self, case: Case, version: int | None = None) -> tuple[int | None, Digest | None]:
        """Look at every byte of a store. Returns its newest version, and what a reader who has nothing gets."""
        held = (version, *state_of(case.root / "store"))
        if held not in self.looks:
            drawn = self.names.again(1 << 30)
            seen = head(case)
            self.looks[held] = seen, None if seen is None else pulled(case, version)
            self.names.drawn = drawn
        return self.looks[held]


@pytest.fixture
def bench(tmp_path: Path, names: Names, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, names, monkeypatch)


def head(case: Case) -> int | None:
    """Return the newest version after a look at every byte of the store; None if it has none."""
    store = LocalStore(case.url)
    if not os.path.exists(os.path.join(case.url, "store.json")):
        assert not os.path.isdir(os.path.join(case.url, "manifests"))
        return None
    report = verify_store(store, deep=True, scratch=str(case.root))
    assert report.problems == ()
    assert report.rebuilt == len(report.versions)
    return max(report.versions, default=None)


def pulled(case: Case, version: int | None = None) -> Digest:
    """Return what a reader who has nothing gets."""
    fresh = case.root / "fresh"
    case.store.heal()
    with Follower(case.url, CheckpointTarget(fresh)) as follower:
        prepared = follower.prepare(version)
        assert prepared is not None
        prepared.apply()
    found: Digest = make_cases.ckpt_digest(fresh)
    shutil.rmtree(fresh)
    return found


def litter(case: Case) -> set[str]:
    """Return the attempts in a store that no manifest and no anchor names."""
    store = LocalStore(case.url)
    if not os.path.isdir(case.url):
        return set()
    named = b"".join((case.root / "store" / k).read_bytes() for p in ("manifests/", "anchors/") for k in store.keys(p))
    return {k.split("/")[1] for k in store.keys("data/") if k.split("/")[1].encode() not in named}


# ---------------------------------------------------------------- publishing from a folder


@dataclass(frozen=True)
class FolderScenario:
    """Versions that are published first, what is published under faults, and what comes next."""

    before: tuple[str, ...]
    what: str
    after: str
    options: dict[str, Any] = field(default_factory=dict)


FOLDERS = {
    "full": FolderScenario((), "v0", "v1"),
    "delta": FolderScenario(("v0",), "v1", "v2"),
    "empty": FolderScenario(("v0", "v1"), "v1", "v2"),
    "rewind": FolderScenario(("v0", "v1", "v2"), "v0", "v3", {"resume": True}),
    "delta and anchor": FolderScenario(("v0",), "v1", "v2", {"anchors": True}),
    "rebuilt base": FolderScenario(("v0", "v1"), "v2", "v3", {"resume": True}),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_publish_from_a_folder_is_whole_or_not_there(name: str, bench: Bench, tmp_path: Path) -> None:
    """A commit whose record on this host could not be kept was taken back: the manifest stayed, its shards went."""
    scenario = FOLDERS[name]
    expect = make_cases.chain(tmp_path / "v", 3)["versions"]
    if name == "rebuilt base":
        expect = {label: expect[label] for label in expect}

    def publish(case: Case, label: str, **options: Any) -> int:
        return publish_folder(str(tmp_path / "v" / label), case.url, **{"anchors": False, **options}).version

    template = bench.use(bench.template)
    for label in scenario.before:
        publish(template, label)
    if name == "rebuilt base":
        shutil.rmtree(bench.template / "state")
    case = bench.copy()
    case.store.arm(None, "before", "kill")
    publish(case, scenario.what, **scenario.options)
    operations = list(case.store.operations)
    assert any(o.startswith("put manifests/") for o in operations)
    was = len(scenario.before) - 1 if scenario.before else None
    old = expect[scenario.before[-1]] if scenario.before else None
    followed = set[State]()
    for number, when, way in places(operations):
        with at(f"{way} {when} {number} of {len(operations)}, {operations[number - 1]}"):
            case = bench.copy()
            case.store.arm(number, when, way)
            done = None
            with contextlib.suppress(DeltaError, Killed):
                done = publish(case, scenario.what, **scenario.options)
            case.store.heal()
            seen, held = bench.look(case)
            assert seen in (was, (was or 0) + (was is not None))
            if done is not None:
                assert seen == done
            if seen is not None:
                assert held == (old if seen == was else expect[scenario.what])
            assert len(litter(case)) <= 1
            if (left := state_of(case.root)) in followed:
                continue
            followed.add(left)
            # What died is started again; nothing is cleaned by hand.
            publish(case, scenario.what, **{**scenario.options, "anchors": False})
            assert bench.look(case)[1] == expect[scenario.what]
            publish(case, scenario.after)
            assert bench.look(case)[1] == expect[scenario.after]
            assert {a for a in litter(case) if "-anchor-" not in a} == set()


def test_an_anchor_is_whole_or_not_there(bench: Bench, tmp_path: Path) -> None:
    expect = make_cases.chain(tmp_path / "v", 2)["versions"]
    template = bench.use(bench.template)
    for v in range(3):
        publish_folder(str(tmp_path / "v" / f"v{v}"), template.url, anchors=False)
    case = bench.copy()
    case.store.arm(None, "before", "kill")
    make_anchor(case.url, 1)
    operations, followed = list(case.store.operations), set[State]()
    for number, when, way in places(operations):
        with at(f"{way} {when} {number} of {len(operations)}, {operations[number - 1]}"):
            case = bench.copy()
            case.store.arm(number, when, way)
            with contextlib.suppress(DeltaError, Killed):
                make_anchor(case.url, 1)
            case.store.heal()
            assert bench.look(case, 1) == (2, expect["v1"])
            assert len(litter(case)) <= 1
            if (left := state_of(case.root)) in followed:
                continue
            followed.add(left)
            make_anchor(case.url, 1)
            assert bench.look(case, 1) == (2, expect["v1"])


# ---------------------------------------------------------------- publishing tensors


def weights(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of a step; each step changes some elements of each."""
    found = {"a": np.arange(300, dtype=np.uint16), "b": np.linspace(0, 1, 40, dtype=np.float32).reshape(4, 10)}
    for s in range(1, step + 1):
        found["a"][s::17] += s
        found["b"][s % 4, ::3] += s
    return found


def digest_of(tensors: dict[str, np.ndarray[Any, Any]], root: Path) -> Digest:
    dtypes = {"uint16": "U16", "float32": "F32"}
    shards = {"m.safetensors": [(n, dtypes[t.dtype.name], t.shape, t.tobytes()) for n, t in tensors.items()]}
    found: Digest = make_cases.ckpt_digest(make_cases.write_ckpt(root / "digest", shards))
    return found


@dataclass(frozen=True)
class TensorScenario:
    """Steps published first; by the same publisher or not; the step published under faults, and the next one."""

    before: tuple[int, ...]
    what: int
    after: int
    same: bool = True
    resume: bool = False


TENSORS = {
    "full": TensorScenario((), 0, 1),
    "delta": TensorScenario((0, 1), 2, 3),
    "empty": TensorScenario((0, 1), 1, 2),
    "restarted": TensorScenario((0, 1), 2, 3, same=False),
    "restarted at the head": TensorScenario((0, 1), 1, 2, same=False),
    "restarted at an earlier version": TensorScenario((0, 1, 2), 0, 3, same=False, resume=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_base_of_a_publisher_is_the_last_manifest(name: str, bench: Bench, tmp_path: Path) -> None:
    """Its base was taken for a version whose commit had failed, and the next delta was against the wrong weights; a
    first commit without an answer was made again, lost against itself, and the publisher was stuck."""
    scenario = TENSORS[name]
    expect = {step: digest_of(weights(step), tmp_path) for step in range(4)}

    def start(case: Case) -> Publisher:
        return Publisher(case.url, anchors=False, resume=scenario.resume)

    if not scenario.same:
        with start(bench.use(bench.template)) as publisher:
            for step in scenario.before:
                publisher.publish(weights(step))

    def run(number: int | None, when: Any, way: Kind) -> tuple[Case, Publisher | None, bool]:
        case, publisher, done = bench.copy(), None, False
        if scenario.same:
            publisher = start(case)
            for step in scenario.before:
                publisher.publish(weights(step))
        case.store.arm(number, when, way)
        with contextlib.suppress(DeltaError, Killed):
            publisher = publisher or start(case)
            publisher.publish(weights(scenario.what))
            done = True
        return case, publisher, done

    case, _, done = run(None, "before", "kill")
    assert done
    operations = list(case.store.operations)
    old = expect[scenario.before[-1]] if scenario.before else None
    followed = set[State]()
    for number, when, way in places(operations):
        with at(f"{way} {when} {number} of {len(operations)}, {operations[number - 1]}"):
            case, survivor, done = run(number, when, way)
            case.store.heal()
            seen, held = bench.look(case)
            if seen is not None:
                assert held in ([expect[scenario.what]] if done else [old, expect[scenario.what]])
            assert len(litter(case)) <= 1
            # An error leaves the publisher at work; from death on it is a new one, of the same host.
            if survivor is None or way == "kill":
                if (left := state_of(case.root)) in followed:
                    continue
                followed.add(left)
                survivor = start(case)
            survivor.publish(weights(scenario.after))
            assert bench.look(case)[1] == expect[scenario.after]
            survivor.publish(weights(scenario.what))
            assert bench.look(case)[1] == expect[scenario.what]
            assert litter(case) == set()


def test_an_interrupted_publisher_goes_on(bench: Bench, tmp_path: Path) -> None:
    """Ctrl-C in a notebook, at every store operation, and the same publisher goes on: it lost against itself."""
    expect = {step: digest_of(weights(step), tmp_path) for step in range(4)}

    def run(number: int | None, when: Any) -> tuple[Case, Publisher]:
        case = bench.copy()
        publisher = Publisher(case.url, anchors=False)
        publisher.publish(weights(0))
        case.store.arm(number, when, "kill")
        with contextlib.suppress(Killed):
            publisher.publish(weights(1))
        return case, publisher

    operations = list(run(None, "before")[0].store.operations)
    for number in range(1, len(operations) + 1):
        for when in ("before", "after"):
            with at(f"{when} {number} of {len(operations)}, {operations[number - 1]}"):
                case, publisher = run(number, when)
                case.store.heal()
                publisher.publish(weights(2))
                assert bench.look(case)[1] == expect[2]


def test_an_interrupted_advance_of_the_base_is_not_believed(bench: Bench, tmp_path: Path) -> None:
    """Half of a delta was on the base; the next one was made against it."""
    case = bench.copy()
    with pytest.MonkeyPatch.context() as patched, Publisher(case.url, anchors=False) as publisher:
        publisher.publish(weights(0))

        def half(*_: object, **__: object) -> None:
            assert publisher._base is None
            raise KeyboardInterrupt

        patched.setattr("deltackpt.publish.backend.apply", half)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(weights(1))
        patched.undo()
        bench.use(case.root)
        publisher.publish(weights(2))
    head(case)
    assert pulled(case) == digest_of(weights(2), tmp_path)


# ---------------------------------------------------------------- pulling


@dataclass
class Breaker:
    """Counts what is done to files, and fails at the n-th, before or after it, by an error or by death.

    After death every operation is refused: a dead process does no cleaning.
    """

    number: int | None = None
    when: str = "before"
    way: int | None = None
    operations: list[str] = field(default_factory=list)
    dead: bool = False
    active: bool = False

    NAMES = ("replace", "rename", "fsync", "unlink", "link", "symlink", "mkdir", "rmdir", "posix_fallocate", "write")

    def call(self, name: str, real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not self.active:
            return real(*args, **options)
        if self.dead:
            raise Killed
        self.operations.append(f"{name} {args[0] if args and isinstance(args[0], str) else ''}".strip())
        fails = len(self.operations) == self.number
        if fails and self.when == "before":
            self._fail()
        result = real(*args, **options)
        if fails:
            self._fail()
        return result

    def _fail(self) -> None:
        if self.way is None:
            self.dead = True
            raise Killed
        raise OSError(self.way, os.strerror(self.way))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in self.NAMES:
            monkeypatch.setattr(os, name, partial(self.call, name, getattr(os, name)))
        breaker = self

        class Counted(mmap.mmap):
            def flush(self, *args: Any) -> None:
                breaker.call("flush", lambda: None)

        monkeypatch.setattr(mmap, "mmap", Counted)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        self.active = True
        try:
            yield
        finally:
            self.active = False


@dataclass(frozen=True)
class PullScenario:
    """versions: published labels, in order. start: how the target is made; want: version to pull, None for newest."""

    mode: Literal["replace", "switch", "in-place"]
    start: str
    want: int | None = None
    reseed: bool = False
    case: str = "p14_torn_apply"


PULLS = {
    "replace, new folder": PullScenario("replace", "nothing", 1),
    "replace, one delta": PullScenario("replace", "v0", 1),
    "replace, three deltas of a folder with a record": PullScenario("replace", "pulled 0"),
    "replace, backwards": PullScenario("replace", "pulled 3", 1),
    "replace, resharded": PullScenario("replace", "pulled 0", 1, case="p12_reshard"),
    "replace, to a single file": PullScenario("replace", "pulled 1", 2, case="p12_reshard"),
    "replace, reseeded": PullScenario("replace", "other", 1, reseed=True),
    "replace, reseeded to a single file": PullScenario("replace", "other", 2, reseed=True, case="p12_reshard"),
    "switch, new folder": PullScenario("switch", "nothing", 1),
    "switch, one delta": PullScenario("switch", "pulled 0", 1),
    "switch, third version": PullScenario("switch", "pulled 0 1", 2),
    "switch, backwards": PullScenario("switch", "pulled 0 1", 0),
    "in-place, new folder": PullScenario("in-place", "nothing", 1),
    "in-place, one delta": PullScenario("in-place", "v0", 1),
    "in-place, three deltas": PullScenario("in-place", "pulled 0"),
    "in-place, backwards": PullScenario("in-place", "pulled 3", 1),
    "in-place, reseeded": PullScenario("in-place", "other", 1, reseed=True),
}


def pull(root: Path, dest: Path, scenario: PullScenario, version: int | None, reseed: bool = False) -> None:
    target = CheckpointTarget(dest, mode=scenario.mode)
    # Threads would take turns at tensors of a few bytes; those of the same follower after an error are below.
    follower = Follower(str(root / "store"), target, threads=1)
    try:
        prepared = follower.prepare(version, reseed=reseed)
        if prepared is not None:
            prepared.apply()
        follower.close()
    except DeltaError:
        follower.close()
        raise
    except Killed:
        # The kernel closes what a dead process had open, and nothing more is done.
        if target._lock is not None:
            os.close(target._lock)
        raise


def holder(dest: Path) -> Path:
    return dest / "current" if os.path.lexists(dest / "current") else dest


def files(folder: Path) -> set[str]:
    """Return the names in a folder but this package's own."""
    return {p.name for p in folder.iterdir()} - {".deltackpt"}


def left_in(dest: Path) -> State:
    """Return all that a target holds. Of times it matters which files a record means and which folder is older."""
    at_time: dict[int, list[str]] = {}
    for path in sorted(dest.rglob("*")):
        at_time.setdefault(path.lstat().st_mtime_ns, []).append(str(path.relative_to(dest)))
    records = {}
    for path in sorted(dest.rglob("state.json")):
        record = re.sub(r",(\d{19})]", lambda found: repr(at_time.get(int(found[1]))), path.read_text())
        records[path.relative_to(dest)] = record
    rest = (one for one in state_of(dest) if not (isinstance(one, tuple) and one[0].endswith("state.json")))
    return (*rest, *records.items(), *sorted(dest.glob("v*"), key=lambda p: p.stat().st_mtime_ns))


@pytest.mark.parametrize("name", PULLS)
def test_a_target_is_old_or_new_or_says_that_it_is_dirty(
    name: str, cases: Callable[[str], Path], names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = PULLS[name]
    root = cases(scenario.case)
    labels = ["v0", "v1", "v2", "v3"] if scenario.case == "p14_torn_apply" else ["v0", "v1", "v2"]
    for label in labels:
        publish_folder(str(root / label), str(root / "store"), anchors=False)
    versions = {v: make_cases.ckpt_digest(root / label) for v, label in enumerate(labels)}
    if scenario.start == "other":
        make_cases.write_ckpt(root / "start", make_cases.tiny(seed=500))
    elif scenario.start == "v0":
        shutil.copytree(root / "v0", root / "start")
    elif scenario.start != "nothing":
        for version in scenario.start.split()[1:]:
            pull(root, root / "start", scenario, int(version))
    old = make_cases.ckpt_digest(holder(root / "start")) if (root / "start").exists() else None
    want = len(labels) - 1 if scenario.want is None else scenario.want
    breaker = Breaker()
    breaker.install(monkeypatch)

    def copy(number: int) -> Path:
        shutil.rmtree(root / "t", ignore_errors=True)
        dest = root / "t" / "dest"
        dest.parent.mkdir()
        # Above all names in the beginning.
        names.again(1 << 16)
        if (root / "start").exists():
            shutil.copytree(root / "start", dest, symlinks=True)
        return dest

    dest = copy(0)
    with breaker.at_work():
        pull(root, dest, scenario, scenario.want, scenario.reseed)
    assert make_cases.ckpt_digest(holder(dest)) == versions[want]
    clean, operations = files(holder(dest)), breaker.operations
    followed = set[State]()
    for number in range(1, len(operations) + 1):
        for when, way in (("before", errno.ENOSPC), ("before", None), ("after", errno.EIO), ("after", None)):
            with at(f"{way} {when} {number} of {len(operations)}, {operations[number - 1]}"):
                dest = copy(number)
                breaker.number, breaker.when, breaker.way = number, when, way
                breaker.operations, breaker.dead = [], False
                done = False
                with breaker.at_work(), contextlib.suppress(DeltaError, Killed):
                    pull(root, dest, scenario, scenario.want, scenario.reseed)
                    done = True
                if (left := (done, *left_in(dest))) in followed:
                    continue
                followed.add(left)
                require_honest(root, dest, versions, old, versions[want], done)
                # An interrupted reseed has to be asked for again where nothing was changed yet.
                again = scenario.reseed and read_record(str(dest)) is None
                pull(root, dest, scenario, want, again)
                assert make_cases.ckpt_digest(holder(dest)) == versions[want]
                assert files(holder(dest)) == clean
                report = verify_folder(dest, LocalStore(root / "store"))
                assert (report.version, report.problems) == (want, ())
                own = dest / ".deltackpt"
                left = os.listdir(own) if own.exists() else []
                assert left == ([] if scenario.mode == "switch" else ["state.json"])


def require_honest(
    root: Path, dest: Path, versions: dict[int, Digest], old: Digest | None, new: Digest, done: bool
) -> None:
    """Assert that a folder is the old version, or the new one, or dirty and saying so."""
    record = read_record(str(dest)) if dest.exists() else None
    if record is not None and record.pending is not None:
        assert not done
        assert cli_run("verify", dest, "--against", root / "store").exit_code == 50
        return
    if not dest.exists() or not any(n.endswith(".safetensors") for n in os.listdir(holder(dest))):
        assert old is None
        assert not done
        return
    found = make_cases.ckpt_digest(holder(dest))
    assert found == new if done else found in (old, new)
    inner = read_record(str(holder(dest)))
    if inner is not None:
        assert found == versions[inner.version]
        assert cli_run("verify", dest, "--against", root / "store").exit_code == 0


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_the_same_follower_goes_on_after_any_error(
    mode: Literal["replace", "in-place"], cases: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = cases("p14_torn_apply")
    for v in range(3):
        publish_folder(str(root / f"v{v}"), str(root / "store"), anchors=False)
    breaker = Breaker(way=errno.EIO)
    breaker.install(monkeypatch)
    total = 1
    while breaker.number is None or breaker.number < total:
        breaker.number = (breaker.number or 0) + 1
        with at(f"{breaker.number} of {total}"):
            dest = shutil.copytree(root / "local", root / f"dest-{breaker.number}")
            with Follower(str(root / "store"), CheckpointTarget(dest, mode=mode)) as follower:
                breaker.operations = []
                with breaker.at_work(), contextlib.suppress(DeltaError):
                    prepared = follower.prepare(1)
                    assert prepared is not None
                    prepared.apply()
                total = max(total, len(breaker.operations))
                prepared = follower.prepare(2)
                assert prepared is not None
                prepared.apply()
            assert make_cases.ckpt_digest(dest) == make_cases.ckpt_digest(root / "v2")
            assert open_folder(dest).checkpoint.layout.total_bytes > 0
            assert verify_folder(dest, LocalStore(root / "store")).problems == ()
