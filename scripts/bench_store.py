"""The --store section of the bench: buckets, beside the raw clients that could be used instead."""

from __future__ import annotations

import contextlib
import heapq
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from fileserver import Server, serving
from safetensors.numpy import save_file
from weed import BUCKET, environment, seaweedfs

from deltackpt import CheckpointTarget, Follower, Publisher, publish_folder
from deltackpt.fsspecstore import FsspecStore
from deltackpt.obstorestore import ObstoreStore
from deltackpt.reader import requests
from deltackpt.remote import REQUESTS, parse
from deltackpt.store import LocalStore, Retrying, Store
from deltackpt.watch import Event, Pace, Watcher

OBJECT = 32 << 20
CHUNK = 16 << 20
BATCH = 4
"""Ranges that s3fs asks for at a time; 8 were as fast, 12 and its default slower."""
MONTH_S = 30 * 86400
GET_USD, PUT_USD = 0.40e-6, 5e-6
"""Of one request, at the list prices of AWS us-east-1."""


class Line(NamedTuple):
    """A number, its unit, and what is wanted of it."""

    name: str
    value: float
    unit: str
    target: str = ""


@dataclass(frozen=True)
class Objects:
    """Objects to fetch, each into its own part of memory that exists already."""

    endpoint: str
    keys: list[str]
    out: list[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.out))

    def pieces(self) -> Iterator[tuple[str, memoryview, int]]:
        """Yield ranges: key, where to put it, offset in the object."""
        for key, out in zip(self.keys, self.out, strict=True):
            for begin in range(0, len(out), CHUNK):
                yield key, out[begin : begin + CHUNK], begin


Client = Callable[[Objects], None]


# ---------------------------------------------------------------- the clients


def by_obstore(objects: Objects) -> Client:
    """Ranges, copied piece by piece as they come."""
    import obstore
    from obstore.store import S3Store

    # Before 1.0 the types of obstore change with every release.
    made: Any = S3Store
    store = made(
        BUCKET, endpoint=objects.endpoint, region="us-east-1", skip_signature=True,
        virtual_hosted_style_request=False, client_options={"allow_http": True},
    )  # fmt: skip

    def get(key: str, out: memoryview, begin: int) -> None:
        done = 0
        for piece in obstore.get(store, key, options={"range": (begin, begin + len(out))}).stream(1 << 20):
            view = memoryview(piece)
            out[done : done + len(view)] = view
            done += len(view)

    return _threaded(get)


def by_boto3(objects: Objects) -> Client:
    """Ranges, read from the socket into memory."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    s3: Any = boto3.client(
        "s3", endpoint_url=objects.endpoint, region_name="us-east-1",
        config=Config(signature_version=UNSIGNED, max_pool_connections=REQUESTS, s3={"addressing_style": "path"}),
    )  # fmt: skip

    def get(key: str, out: memoryview, begin: int) -> None:
        found = s3.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={begin}-{begin + len(out) - 1}")
        raw, done = found["Body"]._raw_stream, 0
        while done < len(out):
            count = raw.readinto(out[done:])
            if not count:
                raise EOFError(key)
            done += count
        raw.release_conn()

    return _threaded(get)


def _threaded(get: Callable[[str, memoryview, int], None]) -> Client:
    pool = ThreadPoolExecutor(REQUESTS)

    def fetch(objects: Objects) -> None:
        list(pool.map(lambda piece: get(*piece), objects.pieces()))

    return fetch


def by_cat_ranges(objects: Objects) -> Client:
    """s3fs, a batch at a time: it has no way to read into memory."""
    from s3fs import S3FileSystem

    fs: Any = S3FileSystem(
        anon=True, endpoint_url=objects.endpoint, skip_instance_cache=True, use_listings_cache=False,
        config_kwargs={"max_pool_connections": 2 * REQUESTS, "s3": {"addressing_style": "path"}},
    )  # fmt: skip

    def fetch(objects: Objects) -> None:
        pieces = list(objects.pieces())
        for i in range(0, len(pieces), REQUESTS):
            batch = pieces[i : i + REQUESTS]
            paths = [f"{BUCKET}/{key}" for key, _, _ in batch]
            ends = [begin + len(out) for _, out, begin in batch]
            found = fs.cat_ranges(paths, [begin for _, _, begin in batch], ends, batch_size=BATCH)
            for (_, out, _), content in zip(batch, found, strict=True):
                out[:] = content

    return fetch


def by_ours(make: Callable[[dict[str, str]], Store]) -> Callable[[Objects], Client]:
    """One of our stores, with its retries and in chunks as the reader makes them."""

    def client(objects: Objects) -> Client:
        store = Retrying(make({"endpoint": objects.endpoint, "anonymous": "yes", "region": "us-east-1"}))

        def get(piece: tuple[str, memoryview, int]) -> None:
            key, out, begin = piece
            store.read_into(key, out, offset=begin)

        def fetch(objects: Objects) -> None:
            # As the reader does it.
            for _ in requests(store, get, objects.pieces(), None):
                pass

        return fetch

    return client


OURS, OURS_FSSPEC = "ours, obstore", "ours, fsspec"
CLIENTS: dict[str, Callable[[Objects], Client]] = {
    "obstore": by_obstore,
    "boto3": by_boto3,
    OURS: by_ours(lambda how: ObstoreStore(parse(f"s3://{BUCKET}"), how)),
    "s3fs cat_ranges": by_cat_ranges,
    OURS_FSSPEC: by_ours(lambda how: FsspecStore(f"s3://{BUCKET}", how)),
}


# ---------------------------------------------------------------- bulk transfers


def _affordable(nbytes: int, work: Path) -> int:
    """Halve a size until disk and memory have room for it four times."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    while nbytes > OBJECT and 4 * nbytes > min(shutil.disk_usage(work).free, pages):
        nbytes //= 2
    return nbytes


def _write_objects(bucket: Path, nbytes: int) -> list[str]:
    block = np.random.default_rng(0).integers(0, 256, OBJECT, np.uint8)
    keys = [f"data/{i}" for i in range(nbytes // OBJECT)]
    (bucket / "data").mkdir(parents=True)
    for i, key in enumerate(keys):
        (bucket / key).write_bytes(np.roll(block, i + 1).tobytes())
    return keys


@dataclass
class Spent:
    """What the runs of one client took, in seconds."""

    wall: list[float]
    cpu: list[float]

    def run(self, fetch: Client, objects: Objects) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        fetch(objects)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)


def transfers(work: Path, repeats: int, mib: int) -> Iterator[Line]:
    """Fetch the shards of a version by each client in turn, from a server that sends from the page cache."""
    root = work / "root"
    keys = _write_objects(root / BUCKET, _affordable(mib << 20, work))
    # Written to, so that its pages are there; every client fills the same ones.
    memory = np.full(len(keys) * OBJECT, 1, np.uint8)
    out = [memoryview(memory[i : i + OBJECT]).cast("B") for i in range(0, memory.size, OBJECT)]
    with serving(root, work) as server:
        objects = Objects(server.endpoint, keys, out)
        what = f"{objects.nbytes >> 20} MiB in {len(keys)} objects from {server.name}"
        print(f"{what}; {REQUESTS} requests in flight, medians of {repeats}; {versions()}", flush=True)
        clients = {name: make(objects) for name, make in CLIENTS.items()}
        for name, fetch in clients.items():
            _require_right(name, fetch, objects, root / BUCKET)
        spent = {name: Spent([], []) for name in clients}
        # By turns, so that what disturbs one disturbs all.
        for _ in range(repeats):
            for name, fetch in clients.items():
                spent[name].run(fetch, objects)
    yield from _compared(spent, objects.nbytes / 1e9)


def versions() -> str:
    """Name the clients' versions."""
    return ", ".join(f"{name} {version(name)}" for name in ("obstore", "boto3", "s3fs"))


def _require_right(name: str, fetch: Client, objects: Objects, bucket: Path) -> None:
    for out in objects.out:
        out[:] = bytes(len(out))
    fetch(objects)
    for key, out in zip(objects.keys, objects.out, strict=True):
        if (bucket / key).read_bytes() != out:
            raise AssertionError(f"{name} fetched other bytes for {key}")


def _compared(spent: dict[str, Spent], gb: float) -> Iterator[Line]:
    # Of single runs the best ones differ by a half; medians of runs taken in turns do not.
    speed = {name: gb / statistics.median(one.wall) for name, one in spent.items()}
    raw = max(speed["obstore"], speed["boto3"])
    for name, one in spent.items():
        yield Line(f"fetch by {name}", speed[name], "GB/s")
        yield Line(f"fetch by {name}: of the best raw client", speed[name] / raw, "x", ">= 0.9" if name == OURS else "")
        target = "< 1" if name in (OURS, OURS_FSSPEC) else ""
        yield Line(f"fetch by {name}: process CPU", statistics.median(one.cpu) / gb, "s/GB", target)
    yield Line(f"fetch by {OURS_FSSPEC}: of cat_ranges", speed[OURS_FSSPEC] / speed["s3fs cat_ranges"], "x", ">= 0.9")


def uploads(work: Path) -> Iterator[Line]:
    """Put shards to SeaweedFS. It is the server that takes the time, so only CPU of this process counts."""
    block = np.random.default_rng(1).integers(0, 256, OBJECT, np.uint8)
    with seaweedfs(work / "weed") as endpoint, environment(endpoint, work / "state"):
        store = Retrying(ObstoreStore(parse(f"s3://{BUCKET}/put")))
        store.put("first", [b"x"])
        wall, cpu = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: store.put(f"data/{i}", [block]), range(8)))
        gb = 8 * OBJECT / 1e9
        yield Line(f"put by {OURS}, to SeaweedFS: process CPU", (time.process_time() - cpu) / gb, "s/GB", "< 1")
        yield Line(f"put by {OURS}, to SeaweedFS (its own pace)", gb / (time.perf_counter() - wall), "GB/s")


# ---------------------------------------------------------------- polls


class Counting:
    """A store that counts its calls by kind and first part of the key."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self.calls: Counter[tuple[str, str]] = Counter()

    def __getattr__(self, name: str) -> Any:  # whatever the store has
        found = getattr(self._store, name)
        if not callable(found):
            return found

        def call(key: str, *arguments: Any, **named: Any) -> Any:
            with self._lock:
                self.calls[name, key.partition("/")[0]] += 1
            return found(key, *arguments, **named)

        return call


class Clock(Pace):
    """A clock that is set by hand; chance is always the same."""

    seconds = 1e9

    def now(self) -> float:
        return self.seconds

    def date(self) -> float:
        return self.seconds


def published(store: Path, count: int, elements: int = 4096) -> Iterator[int]:
    """Publish versions of one tensor, every one a little different, and yield their numbers."""
    weights = np.zeros(elements, np.float32)
    with contextlib.closing(Publisher(str(store), run_id="bench")) as publisher:
        for i in range(count):
            weights[i :: elements // 64] += 1
            yield publisher.publish({"w": weights}).version


def one_poll(work: Path) -> Iterator[Line]:
    """Count at the server what a watcher that has nothing to do asks of it."""
    root, polls = work / "root", 50
    store = root / BUCKET / "run"
    list(published(store, 2))
    how = {"anonymous": "yes", "region": "us-east-1"}
    with serving(root, work) as server:
        how["endpoint"] = server.endpoint
        url = f"s3://{BUCKET}/run"
        for name, made in ((OURS, ObstoreStore(parse(url), how)), (OURS_FSSPEC, FsspecStore(url, how))):
            dest = str(work / name)
            # This server lists nothing, so a newcomer gets its first version from the folder itself.
            Watcher(str(store), dest).once()
            asked = _asked(server, Retrying(made), dest, polls)
            lists = sum("list-type" in line for line in asked)
            yield Line(f"a poll by {name}: requests at the server", len(asked) / polls, "", "1")
            yield Line(f"a poll by {name}: listings", lists / polls, "", "0")


def _asked(server: Server, store: Store, dest: str, polls: int) -> list[str]:
    """Return the requests of the polls that follow the first, which opens the folder."""
    watcher = Watcher(store, dest)
    with contextlib.closing(watcher):
        watcher.step()
        before = len(server.requests())
        for _ in range(polls):
            watcher.step()
        if watcher.state.last_error:
            raise AssertionError(watcher.state.last_error)
        return server.requests()[before:]


def idle(work: Path, followers: int) -> Iterator[Line]:
    """Let followers with nothing to do poll one store, by a clock of their own; count what that is a month."""
    store = Counting(LocalStore(str(work / "store")))
    list(published(work / "store", 2))
    for poll_s in (1.0, 5.0):
        clock = Clock()
        watchers = [
            Watcher(cast(Store, store), str(work / f"dest-{i}"), poll_s=poll_s, pace=clock) for i in range(followers)
        ]
        calls, seconds = _simulate(watchers, store, clock, 20 * poll_s)
        clock.close()
        month = calls.total() / seconds * MONTH_S
        other = calls.total() - calls["get", "manifests"]
        yield Line(f"{followers} idle, {poll_s:g} s: requests a month", month / 1e6, "million")
        yield Line(f"{followers} idle, {poll_s:g} s: other than a look for the next", other, "requests", "0")
        yield Line(f"{followers} idle, {poll_s:g} s: dollars a month", month * GET_USD, "USD")
        yield Line(f"one idle, {poll_s:g} s: dollars a month", month * GET_USD / followers, "USD")


def _simulate(
    watchers: Sequence[Watcher], store: Counting, clock: Clock, seconds: float
) -> tuple[Counter[tuple[str, str]], float]:
    """Run watchers, each whenever its pause is over; returns the calls after all had their first version."""
    with contextlib.ExitStack() as stack:
        for watcher in watchers:
            stack.enter_context(contextlib.closing(watcher))
            # The first step fetches.
            watcher.step()
        began = clock.seconds
        due = [(began + watcher.step(), i) for i, watcher in enumerate(watchers)]
        heapq.heapify(due)
        store.calls.clear()
        while due[0][0] < began + seconds:
            clock.seconds, i = due[0]
            heapq.heapreplace(due, (clock.seconds + watchers[i].step(), i))
        return store.calls.copy(), seconds


def leases(work: Path) -> Iterator[Line]:
    """Count what the lease of one idle follower costs, over an hour at 5 s."""
    list(published(work / "store", 2))
    store, held = LocalStore(str(work / "store")), Counting(LocalStore(str(work / "leases")))
    clock = Clock()
    with contextlib.closing(
        Watcher(store, str(work / "dest"), poll_s=5.0, pace=clock, lease_store=cast(Store, held))
    ) as watcher:
        watcher.step()
        held.calls.clear()
        began = clock.seconds
        while clock.seconds < began + 3600:
            clock.seconds += watcher.step()
    clock.close()
    month = held.calls.total() / 3600 * MONTH_S
    yield Line("lease of one follower: writes a month", month, "requests")
    yield Line("lease of one follower: dollars a month", month * PUT_USD, "USD")


def catch_up(work: Path, behind: int) -> Iterator[Line]:
    """Bring a follower over many versions at once."""
    store, dest = work / "store", str(work / "dest")
    for number in published(store, behind + 1, 1 << 20):
        if number == 0:
            Watcher(str(store), dest).once()
    counted = Counting(LocalStore(str(store)))
    begin = time.perf_counter()
    state = Watcher(cast(Store, counted), dest).once()
    seconds = time.perf_counter() - begin
    if state.applied != behind:
        raise AssertionError(f"the follower is at {state.applied}")
    calls = counted.calls
    payload = calls["get", "data"] + calls["read_into", "data"]
    yield Line(f"over {behind} versions: payload reads", payload, "", f"{behind}")
    yield Line(f"over {behind} versions: apply passes", state.applies, "", "1")
    yield Line(f"over {behind} versions: all requests", calls.total(), "")
    yield Line(f"over {behind} versions: listings", sum(n for (kind, _), n in calls.items() if kind == "keys"), "")
    yield Line(f"over {behind} versions of 4 MiB: wall clock", seconds, "s")


# ---------------------------------------------------------------- publish, pull and watch


def whole(work: Path) -> Iterator[Line]:
    """Publish and pull a version in which every value is another one: as much is stored as there is to compare."""
    rng = np.random.default_rng(2)
    folders = [work / "a", work / "b"]
    for folder in folders:
        folder.mkdir()
        save_file({f"t{i}": rng.integers(0, 1 << 16, 16 << 20, np.uint16) for i in range(8)}, folder / "m.safetensors")
    store, dest = str(work / "store"), CheckpointTarget(str(work / "dest"))
    spent: dict[str, list[float]] = {"publish": [], "pull": []}
    with Follower(store, dest) as follower:
        for number in range(5):
            wall = time.process_time()
            manifest = publish_folder(
                str(folders[number % 2]), store, run_id="r", anchors=False,
                base=str(folders[1 - number % 2]) if number else None,
            )  # fmt: skip
            spent["publish"].append(time.process_time() - wall)
            wall = time.process_time()
            prepared = follower.prepare()
            assert prepared is not None
            prepared.apply()
            spent["pull"].append(time.process_time() - wall)
    for name, seconds in spent.items():
        # The first has no delta, the second loads the kernels.
        cpu = statistics.median(seconds[2:]) / manifest.totals.stored * 1e9
        yield Line(f"a whole {name}, all changed: process CPU", cpu, "s/GB", "< 1")


def latency(work: Path) -> Iterator[Line]:
    """Publish to SeaweedFS at odd moments while a watcher polls it, each in a thread of its own."""
    poll_s, staged = 0.2, dict[int, tuple[float, float]]()

    def say(event: Event) -> None:
        if event.name == "applied":
            stage, apply = (cast(float, event.fields[name]) / 1e3 for name in ("stage_ms", "apply_ms"))
            staged[cast(int, event.fields["version"])] = (time.time() - apply, stage)

    with seaweedfs(work / "weed") as endpoint, environment(endpoint, work / "state"):
        url, weights, waits = f"s3://{BUCKET}/run", np.zeros(1 << 20, np.float32), list[tuple[float, float]]()
        with contextlib.closing(Publisher(url, run_id="bench", anchors=False)) as publisher:
            publisher.publish({"w": weights})
            watcher = Watcher(url, str(work / "dest"), poll_s=poll_s, say=say)
            thread = threading.Thread(target=watcher.run)
            thread.start()
            try:
                for number in range(1, 31):
                    weights[number::64] += 1
                    publisher.publish({"w": weights})
                    committed = time.time()
                    time.sleep(0.5 + 0.013 * number)
                    done, transfer = staged[number]
                    waits.append((done - committed, transfer))
            finally:
                watcher.terminate()
                thread.join(60)
    totals, transfers_s = ([one[i] for one in waits] for i in (0, 1))
    yield Line("commit to staged, polls of 0.2 s, SeaweedFS: median", 1e3 * statistics.median(totals), "ms")
    yield Line("commit to staged: fetching, checking and decoding, median", 1e3 * statistics.median(transfers_s), "ms")
    more = max(total - transfer - 1.25 * poll_s for total, transfer in waits)
    yield Line("commit to staged: beyond the longest poll interval and that, worst of 30", 1e3 * more, "ms", "< 50")


def steady(work: Path, versions: int) -> Iterator[Line]:
    """Publish many versions to SeaweedFS and follow each, all in this process, which must not grow."""
    with seaweedfs(work / "weed") as endpoint, environment(endpoint, work / "state"):
        url, weights, seen = f"s3://{BUCKET}/run", np.zeros(1 << 16, np.float32), dict[int, tuple[float, int]]()
        with (
            contextlib.closing(Publisher(url, run_id="bench", anchors=False)) as publisher,
            contextlib.closing(Watcher(url, str(work / "dest"), poll_s=0.01)) as watcher,
        ):
            for number in range(versions + 1):
                weights[number % 1024 :: 1024] += 1
                publisher.publish({"w": weights})
                watcher.step()
                if watcher.state.applied != number:
                    raise AssertionError(watcher.state.last_error)
                if number in (versions // 10, versions):
                    pages = int(Path("/proc/self/statm").read_text().split()[1])
                    seen[number] = (pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir("/proc/self/fd")))
    (early, few), (late, many) = seen[versions // 10], seen[versions]
    yield Line(f"{versions} versions followed one by one: memory added after {versions // 10}", late - early, "MB")
    yield Line(f"{versions} versions: descriptors added after {versions // 10}", many - few, "", "0")


def store_lines(work: Path, repeats: int, mib: int) -> Iterator[Line]:
    """Measure all of it, each part in a folder of its own that is removed after it."""
    parts: list[Callable[[Path], Iterator[Line]]] = [
        lambda folder: transfers(folder, repeats, mib),
        uploads,
        one_poll,
        lambda folder: idle(folder, 1000),
        leases,
        lambda folder: catch_up(folder, 50),
        whole,
        latency,
        lambda folder: steady(folder, 500),
    ]
    for part in parts:
        with tempfile.TemporaryDirectory(dir=work) as folder:
            yield from part(Path(folder))
