"""Buckets, end to end: publish and pull on a real S3 server by both clients, with faults at every request."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import make_cases
import numpy as np
import pytest
import ranks
from helpers import State, cli_good, cli_run, errors, exact, expected, holds, recorded, state_of, visible
from processes import Server as Children
from safetensors.numpy import load
from servers import BUCKET, ENVIRONMENT, Fault, Proxy, Server, proxy
from watching import Hiding, Told, follow

from deltackpt import probe
from deltackpt.anchor import make_anchor
from deltackpt.board import Group, StoreBoard
from deltackpt.errors import AlreadyExists, Busy, ChainError, ConfigError, DeltaError, IntegrityError, Unavailable
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower
from deltackpt.probe import flaws
from deltackpt.prune import prune_store
from deltackpt.publish import Publisher, publish_folder
from deltackpt.reader import Reader
from deltackpt.store import Retrying, Store, open_remote, open_store, read

CLIENTS = ("s3", "fsspec+s3")
P19_ROUNDS = {"s3": 37, "fsspec+s3": 13}
"""Two writers meet 50 times; most of it by the client that starts faster."""


def use(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all clients of this process reach a server, the usual way."""
    for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": server.endpoint}).items():
        monkeypatch.setenv(name, value)


def trusted(url: str) -> None:
    """Let this host know that a server creates exclusively, so that a test need not find out."""
    remote = open_remote(url)
    probe.remember(remote.place, probe.Found(url, True, True, True, True, True, 0.0, probe.time.time()))


@dataclass
class Bucket:
    """A real server, and a new store on it."""

    server: Server
    url: str

    def store(self) -> Store:
        """Open the store; its client takes longer to start than most requests."""
        return open_store(self.url)

    def objects(self, prefix: str = "") -> list[str]:
        """Return the keys below the root, and the uploads that were begun and not ended."""
        root = self.url.partition(f"://{BUCKET}/")[2]
        client = self.server.client()
        found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{root}/{prefix}").get("Contents", [])
        uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        client.close()
        keys = [f["Key"].removeprefix(f"{root}/") for f in found]
        return sorted(keys) + [f"unfinished {u['Key']}" for u in uploads if u["Key"].startswith(f"{root}/")]

    def versions(self) -> list[int]:
        """Return the versions whose manifests are there."""
        return [int(key[10:-5]) for key in self.objects("manifests/")]


@pytest.fixture(params=CLIENTS)
def bucket(request: pytest.FixtureRequest, seaweedfs: Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new store on SeaweedFS, by each client."""
    use(seaweedfs, monkeypatch)
    made = Bucket(seaweedfs, f"{request.param}://{BUCKET}/{secrets.token_hex(6)}")
    trusted(made.url)
    return made


@pytest.fixture
def chain(cases: Callable[[str], Path]) -> Path:
    """v0 to v3, and `local` at v0."""
    return cases("p29_stale_listing")


def publish(bucket: Bucket | str | Store, folder: Path, **options: object) -> int:
    url = bucket.url if isinstance(bucket, Bucket) else bucket
    return publish_folder(str(folder), url, run_id="r", anchors=False, threads=1, **options).version  # type: ignore[arg-type]  # by name


def pull(bucket: Bucket | str | Store, dest: Path, version: int | None = None, **options: object) -> int | None:
    """Bring a folder up to date; returns the version, or None if it had it."""
    url = bucket.url if isinstance(bucket, Bucket) else bucket
    with Follower(url, CheckpointTarget(str(dest)), threads=1) as follower:
        prepared = follower.prepare(version, **options)  # type: ignore[arg-type]  # by name
        return None if prepared is None else prepared.apply()


# ---------------------------------------------------------------- end to end


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_ranks_publish_to_a_bucket_and_make_an_anchor_there(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltackpt.anchor.ANCHOR_SHARE", 0.0)

    def rank(number: int) -> None:
        store = bucket.store()
        group = Group(number, 2, StoreBoard(store, "one"))
        with Publisher(store, group=group, run_id="run", threads=1) as publisher:
            for step in (0, 1):
                publisher.publish(ranks.share("rows", number, 2, ranks.state(step)), step=step)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))
    (shard,) = [key for key in bucket.objects("data/") if key.startswith(f"data/{1:020d}-anchor-")]
    assert bucket.objects("anchors/") == [f"anchors/{1:020d}.json"]
    bucket.store().read_into(shard, memoryview(raw := bytearray(bucket.store().size(shard))))
    found = load(bytes(raw))
    assert all(np.array_equal(found[name], value) for name, value in ranks.state(1).items())
    assert not [key for key in bucket.objects() if "piece" in key or key.startswith("unfinished")]


def test_versions_go_through_a_bucket_bit_for_bit(bucket: Bucket, chain: Path, tmp_path: Path) -> None:
    expect = expected(chain)
    dest = tmp_path / "dest"
    for version in range(4):
        assert (
            publish(bucket, chain / f"v{version}", base=str(chain / f"v{version - 1}") if version else None) == version
        )
        assert pull(bucket, dest) == version
        exact(dest, expect, version)
    late = tmp_path / "late"
    assert pull(bucket, late) == 3
    exact(late, expect, 3)
    assert pull(bucket, late, 1) == 1
    exact(late, expect, 1)
    assert bucket.versions() == [0, 1, 2, 3]
    assert not any(key.startswith(("unfinished", "probe/")) for key in bucket.objects())


def test_command_line_reaches_a_bucket_by_options_alone(
    seaweedfs: Server, chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(seaweedfs, monkeypatch)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("DELTACKPT_STORAGE_OPTION", f"endpoint={seaweedfs.endpoint} region=us-east-1 path-style=yes")
    store, dest = f"s3://{BUCKET}/{secrets.token_hex(6)}", tmp_path / "dest"
    assert cli_good("publish", chain / "v0", store)["version"] == 0
    assert cli_good("publish", chain / "v1", store)["version"] == 1
    assert cli_good("pull", store, dest)["version"] == 1
    exact(dest, expected(chain), 1)
    assert [v["version"] for v in cli_good("log", store)["versions"]] == [1, 0]
    assert cli_good("show", store)["manifest"]["version"] == 1
    assert cli_good("verify", store, "--deep")["ok"]
    assert cli_good("verify", dest, "--against", store)["ok"]
    assert cli_good("anchor", store)["version"] == 1
    assert cli_good("channel", "set", store, "eval", "0")["version"] == 0
    assert cli_good("tag", store, "best")["version"] == 1
    assert cli_good("prune", store, "--keep", "1")["dry_run"]
    assert cli_good("doctor", store)["store"]["head"] == 1
    found = cli_good("doctor", "--write-probe", store)["probe"]
    assert (found["tier"], found["exclusive_create"], found["one_winner_of_a_race"]) == (1, True, True)
    assert cli_good("mirror", store, tmp_path / "copy")["head"] == 1
    assert visible(tmp_path / "copy") == [0, 1]
    assert cli_good("mirror", tmp_path / "copy", f"{store}-back")["head"] == 1
    assert cli_good("pull", f"{store}-back", tmp_path / "back")["version"] == 1
    exact(tmp_path / "back", expected(chain), 1)


def test_bucket_that_is_not_there_and_keys_that_are_wrong_are_told_apart(
    seaweedfs: Server, chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(seaweedfs, monkeypatch)
    for client in CLIENTS:
        result = cli_run("pull", f"{client}://no-such-bucket/x", tmp_path / "dest")
        assert (result.exit_code, "does not exist or cannot be seen" in errors(result)) == (10, True), errors(result)
        wrong = ("--storage-option", "access_key_id=testkey", "--storage-option", "secret_access_key=no")
        for command in (
            ("pull", f"{client}://{BUCKET}/x", tmp_path / "dest"),
            ("publish", chain / "v0", f"{client}://{BUCKET}/x"),
        ):
            result = cli_run(*command, *wrong)
            assert (result.exit_code, "no permission (403" in errors(result)) == (10, True), errors(result)
    assert not (tmp_path / "dest").exists() or list((tmp_path / "dest").glob("*.safetensors")) == []


# ---------------------------------------------------------------- servers that are not safe


@pytest.mark.parametrize("client", CLIENTS)
def test_server_that_ignores_conditional_writes_is_refused(
    client: str, rclone: Server, chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(rclone, monkeypatch)
    store = f"{client}://{BUCKET}/{secrets.token_hex(6)}"
    result = cli_run("publish", chain / "v0", store)
    assert result.exit_code == ConfigError.exit_code
    assert "ignores conditional writes" in errors(result)
    assert "--single-writer" in errors(result)
    assert list(open_store(store).keys("manifests/")) == list(open_store(store).keys("data/")) == []
    found = cli_good("doctor", "--write-probe", store)["probe"]
    assert (found["tier"], found["exclusive_create"]) == (3, False)
    assert "only with --single-writer: the server ignores conditional writes" in found["verdict"]
    # By the user's word it does.
    for version in (0, 1):
        result = cli_run("publish", chain / f"v{version}", store, "--single-writer", "--json")
        assert (result.exit_code, json.loads(result.stdout)["version"]) == (0, version)
        assert "nothing stops one" in errors(result)
    assert cli_good("pull", store, tmp_path / "dest")["version"] == 1
    exact(tmp_path / "dest", expected(chain), 1)


def test_single_writer_looks_before_it_writes(rclone: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use(rclone, monkeypatch)
    store = open_store(f"s3://{BUCKET}/{secrets.token_hex(6)}", single_writer=True)
    store.put("a/b", [b"first"])
    with pytest.raises(AlreadyExists):
        store.put("a/b", [b"second"])
    assert store.size("a/b") == 5


def test_safe_server_is_probed_once_and_leaves_nothing(seaweedfs: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with proxy(seaweedfs) as faults:
        use(faults.open(), monkeypatch)
        url = f"s3://{BUCKET}/{secrets.token_hex(6)}"
        open_store(url).put("a/b", [b"x"])
        assert 30 < len(faults.requests) < 60
        faults.reset()
        open_store(url + "-two").put("a/b", [b"x"])
        assert len(faults.requests) == 1
        assert list(open_store(url).keys("probe/")) == []
        faults.reset()
        open_store(url).put("a/c", [b"x"], if_absent=False)
        list(open_store(url).keys("a/"))
        assert len(faults.requests) == 2


def test_server_that_checks_before_it_writes_is_found_out() -> None:
    """Two creates at the same moment both win there; one after the other it looks safe."""

    class Racy:
        url = "memory"

        def __init__(self) -> None:
            self.held: dict[str, bytes] = {}
            self.gate = threading.Barrier(probe.RACERS)

        def put(self, key: str, parts: list[bytes], *, if_absent: bool = True) -> None:
            taken = key in self.held
            if "race" in key:
                self.gate.wait()
            if taken:
                raise AlreadyExists(key)
            self.held[key] = b"".join(parts)

        def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
            out[:] = self.held[key][offset : offset + len(out)]

        def keys(self, prefix: str, *, after: str = "") -> Iterator[str]:
            return iter(sorted(k for k in self.held if k.startswith(prefix)))

        def delete(self, key: str) -> None:
            self.held.pop(key, None)

        def modified(self, key: str) -> float:
            return probe.time.time()

    found = probe.probe(Racy())  # type: ignore[arg-type]  # lists of bytes are enough here
    assert (found.exclusive, found.race, found.tier) == (True, False, 3)
    assert flaws(found) == [
        "the server checks before it writes (of several creates at the same moment more than one won)"
    ]


# ---------------------------------------------------------------- faults at every request


FAULTS: tuple[Fault, ...] = ("busy", "refuse", "lost", "truncate", "splice", "denied", "expired")


@dataclass
class Trial:
    """A publish or a pull through a proxy, of which one request fails; no second try is made by the store."""

    faults: Proxy
    url: str

    def store(self) -> Store:
        return open_remote(self.url)


@pytest.fixture(scope="module")
def faults(seaweedfs: Server) -> Iterator[Proxy]:
    with proxy(seaweedfs) as made:
        yield made


@pytest.fixture(params=CLIENTS)
def trial(request: pytest.FixtureRequest, faults: Proxy, monkeypatch: pytest.MonkeyPatch) -> Trial:
    faults.reset()
    use(faults.open(), monkeypatch)
    return Trial(faults, f"{request.param}://{BUCKET}/{secrets.token_hex(6)}")


def at(number: int, fault: Fault) -> Callable[[int, str], Fault]:
    return lambda n, _: fault if n == number else ""


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_at_any_request_of_a_publish_ends_in_the_version_or_a_named_error(
    trial: Trial, chain: Path, tmp_path: Path, fault: Fault
) -> None:
    """And the next publish works: the trainer is never told of a version that is not there, or the other way round.

    Where a fault left the same in the bucket as one before it, and nothing new on this host, what follows is the same.
    """
    expect, store, dest = expected(chain), trial.store(), tmp_path / "dest"
    publish(store, chain / "v1")
    publish(store, chain / "v2", base=str(chain / "v1"))
    trial.faults.reset()
    publish(store, chain / "v1", base=str(chain / "v2"))
    requests, head, held = len(trial.faults.requests), 2, 1
    assert requests > 5
    ended: dict[str, int] = {}
    followed = set[tuple[str, ...]]()
    host = Path(os.environ["XDG_STATE_HOME"])
    for number in range(1, requests + 1):
        new = 3 - held
        objects, records = set(store.keys("data/")), state_of(host)
        trial.faults.reset(at(number, fault))
        try:
            how = str(publish(store, chain / f"v{new}", base=str(chain / f"v{held}")) == head + 1)
        except DeltaError as exc:
            how = type(exc).__name__
        ended[how] = ended.get(how, 0) + 1
        trial.faults.reset()
        found = Reader(store)
        found.load()
        assert found.head is not None
        if found.head.manifest.version == head:
            assert how != "True"
            left = tuple(sorted(key.rpartition("/")[2] for key in objects ^ set(store.keys("data/"))))
            if left in followed and state_of(host) == records:
                continue
            followed.add(left)
            assert publish(store, chain / f"v{new}", base=str(chain / f"v{held}")) == head + 1
        head, held = head + 1, new
        assert pull(store, dest) == head
        exact(dest, expect, head, f"v{held}")
    assert not [key for key in Bucket(trial.faults.server, trial.url).objects() if key.startswith("unfinished")]
    assert set(ended) <= {"True", "Unavailable", "StoreError", "IntegrityError", "FormatError"}, ended


# To a reader, refuse is the same as lost, and denied the same as busy.
@pytest.mark.parametrize("fault", [f for f in FAULTS if f not in ("refuse", "denied")])
def test_fault_at_any_request_of_a_pull_leaves_the_old_version_or_the_new_one(
    trial: Trial, chain: Path, tmp_path: Path, fault: Fault
) -> None:
    """And the next pull works; it is made once for each state that is left, one request is made after every fault."""
    expect, store = expected(chain), trial.store()
    for version in range(3):
        publish(store, chain / f"v{version}", base=str(chain / f"v{version - 1}") if version else None)
    trial.faults.reset()
    old = tmp_path / "old"
    pull(store, old, 1)
    fresh = len(trial.faults.requests)
    shutil.copytree(old, tmp_path / "count")
    trial.faults.reset()
    pull(store, tmp_path / "count")
    delta = len(trial.faults.requests)
    for begin, requests, version in ((None, fresh, 1), (old, delta, 2)):
        followed = set[State]()
        for number in range(1, requests + 1):
            dest = tmp_path / f"{version}-{number}"
            if begin is not None:
                shutil.copytree(begin, dest)
            trial.faults.reset(at(number, fault))
            with contextlib.suppress(DeltaError):
                pull(store, dest, version)
            trial.faults.reset()
            if recorded(dest) is None:
                assert begin is None
                assert not list(dest.glob("*.safetensors"))
            else:
                holds(dest, expect, f"v{recorded(dest)}")
            assert store.size("store.json") > 0
            if (left := state_of(dest)) not in followed:
                followed.add(left)
                pull(store, dest, version)
                exact(dest, expect, version)


@pytest.mark.parametrize("fault", ["busy", "refuse", "reset", "lost", "truncate", "expired"])
def test_with_retries_every_third_request_may_fail(trial: Trial, chain: Path, tmp_path: Path, fault: Fault) -> None:
    store = Retrying(open_remote(trial.url), sleep=lambda _: None)
    trial.faults.reset(lambda n, _: fault if n % 3 == 1 else "")
    for version in range(3):
        assert (
            publish(store, chain / f"v{version}", base=str(chain / f"v{version - 1}") if version else None) == version
        )
    assert pull(store, tmp_path / "dest") == 2
    exact(tmp_path / "dest", expected(chain), 2)


def test_lost_reply_of_the_commit_is_the_publishers_own_version(trial: Trial, chain: Path, tmp_path: Path) -> None:
    """The server has the manifest, the publisher only a closed connection: the manifest found there is its own."""
    for version, store in enumerate((trial.store(), Retrying(trial.store(), sleep=lambda _: None))):
        lost: list[str] = []

        def choose(_: int, line: str, lost: list[str] = lost) -> Fault:
            if line.startswith("PUT") and "/manifests/" in line and not lost:
                lost.append(line)
                return "lost"
            return ""

        trial.faults.reset(choose)
        assert publish(store, chain / f"v{version}", base=str(chain / "v0") if version else None) == version
        assert len(lost) == 1
    trial.faults.reset()
    assert pull(store, tmp_path / "dest") == 1
    exact(tmp_path / "dest", expected(chain), 1)


def test_publisher_that_lost_the_race_is_told_so_even_when_the_reply_was_lost(trial: Trial, chain: Path) -> None:
    store = trial.store()
    publish(store, chain / "v0")

    class Late:
        """Lets another publisher in before the first manifest."""

        url, requests = store.url, store.requests

        def __init__(self) -> None:
            self.done = False

        def put(self, key: str, parts: list[bytes], *, if_absent: bool = True) -> None:
            if key.startswith("manifests/") and not self.done:
                self.done = True
                publish(store, chain / "v2", base=str(chain / "v0"))
                trial.faults.reset(lambda _, line: "lost" if line.startswith("PUT") else "")
                try:
                    store.put(key, parts, if_absent=if_absent)
                finally:
                    trial.faults.reset()
            store.put(key, parts, if_absent=if_absent)

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

    with pytest.raises(AlreadyExists, match="version 1 exists already, written by another publisher"):
        publish(Late(), chain / "v1", base=str(chain / "v0"))


# ---------------------------------------------------------------- cases


class Meeting:
    """A store whose writers wait for each other before their first manifest."""

    def __init__(self, store: Store, barrier: threading.Barrier) -> None:
        self.store, self.barrier, self.met = store, barrier, False

    def put(self, key: str, parts: list[bytes], *, if_absent: bool = True) -> None:
        if key.startswith("manifests/") and not self.met:
            self.met = True
            self.barrier.wait(60)
        self.store.put(key, parts, if_absent=if_absent)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


def test_p19_of_two_writers_exactly_one_publishes_the_version(
    bucket: Bucket, cases: Callable[[str], Path], tmp_path: Path
) -> None:
    root = cases("p19_two_writers")
    expect = expected(root)
    for number in range(P19_ROUNDS[bucket.url.partition("://")[0]]):
        url = f"{bucket.url}-{number}"
        first = open_store(url)
        publish(first, root / "v0")
        barrier = threading.Barrier(2)

        def run(
            who: str, url: str = url, first: Store = first, barrier: threading.Barrier = barrier
        ) -> int | DeltaError:
            # Each its own client; that of A has done the first version, for clients take long to start.
            store: Any = Meeting(first if who == "A" else open_store(url), barrier)
            try:
                return publish(store, root / who / "v1", base=str(root / "v0"))
            except DeltaError as exc:
                return exc

        with ThreadPoolExecutor(2) as pool:
            ended = dict(zip("AB", pool.map(run, "AB"), strict=True))
        (winner,) = [who for who, end in ended.items() if end == 1]
        (loser,) = [end for end in ended.values() if end != 1]
        assert isinstance(loser, AlreadyExists), loser
        assert "version 1 exists already, written by another publisher" in str(loser)
        dest = tmp_path / str(number)
        pull(first, dest)
        exact(dest, expect, 1, f"{winner}/v1")
        # What the loser had put is gone.
        assert len({key.split("/")[1] for key in Bucket(bucket.server, url).objects("data/")}) == 2


def test_p29_follower_sees_what_another_process_publishes(bucket: Bucket, chain: Path, tmp_path: Path) -> None:
    expect, dest = expected(chain), tmp_path / "dest"
    publish(bucket, chain / "v0")
    with Follower(bucket.url, CheckpointTarget(str(dest)), threads=1) as follower:
        prepared = follower.prepare()
        assert prepared is not None
        prepared.apply()
        for version in range(1, 4):
            assert follower.prepare() is None
            assert cli_good("publish", chain / f"v{version}", bucket.url, "--run-id", "r")["version"] == version
            prepared = follower.prepare()
            assert prepared is not None
            assert prepared.apply() == version
            exact(dest, expect, version)


def test_idle_poll_is_one_request_and_no_listing(trial: Trial, chain: Path, tmp_path: Path) -> None:
    store = trial.store()
    publish(store, chain / "v0")
    with Follower(store, CheckpointTarget(str(tmp_path / "dest")), threads=1) as follower:
        prepared = follower.prepare()
        assert prepared is not None
        prepared.apply()
        follower.prepare()
        trial.faults.reset()
        for _ in range(5):
            assert follower.prepare() is None
        assert [line.split(" ")[0] for line in trial.faults.requests] == ["GET"] * 5
        assert all(line.endswith("/manifests/00000000000000000001.json") for line in trial.faults.requests)


def test_p30_throttled_then_expired_credentials_then_new_ones(
    trial: Trial, cases: Callable[[str], Path], tmp_path: Path
) -> None:
    root = cases("p30_throttle_and_creds")
    expect, dest = expected(root), tmp_path / "dest"
    pauses: list[float] = []
    store = Retrying(open_remote(trial.url), sleep=pauses.append, draw=lambda: 1.0)
    publish(store, root / "v0")
    publish(store, root / "v1", base=str(root / "v0"))
    trial.faults.reset(lambda n, _: "busy" if n <= 3 else "")
    assert pull(store, dest) == 1
    exact(dest, expect, 1)
    assert pauses == [0.2, 0.4, 0.8]
    publish(store, root / "v2", base=str(root / "v1"))
    trial.faults.reset(lambda _, __: "expired")
    with pytest.raises(Unavailable, match=r"credentials have expired .*; renew them, the next try reads them anew"):
        pull(store, dest)
    holds(dest, expect, "v1")
    trial.faults.reset()
    assert pull(store, dest) == 2
    exact(dest, expect, 2)
    trial.faults.reset(lambda _, __: "busy")
    pauses.clear()
    with pytest.raises(Unavailable, match="503"):
        pull(store, dest)
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4]
    holds(dest, expect, "v2")


@pytest.mark.parametrize("client", CLIENTS)
def test_p30_credentials_are_read_anew_from_their_file(
    client: str, seaweedfs: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens run out in long jobs; whoever renews them writes the file, and nobody restarts the job."""
    with proxy(seaweedfs) as faults:
        use(faults.open(), monkeypatch)
        file = tmp_path / "credentials"
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

        def write(secret: str) -> None:
            file.write_text(f"[default]\naws_access_key_id = testkey\naws_secret_access_key = {secret}\n")

        write("testsecret123")
        tried: list[float] = []

        def renew(pause: float) -> None:
            tried.append(pause)
            if len(tried) == 2:
                write("testsecret123")
                faults.reset()

        store = Retrying(open_remote(f"{client}://{BUCKET}/{secrets.token_hex(6)}"), sleep=renew)
        store.put("a/b", [b"x"])
        # The old ones are worth nothing any more, and the file is not renewed yet.
        write("old")
        faults.reset(lambda _, __: "expired")
        assert store.size("a/b") == 1
        assert len(tried) == 2


@pytest.mark.parametrize("client", CLIENTS)
def test_p31_odd_bucket_urls(
    client: str, seaweedfs: Server, cases: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = cases("p31_odd_roots")
    expect = expected(root)
    use(seaweedfs, monkeypatch)
    name = f"odd-{secrets.token_hex(4)}"
    seaweedfs.make_bucket(name)
    trusted(f"{client}://{name}")
    raw = seaweedfs.client()

    def keys() -> set[str]:
        return {f["Key"] for f in raw.list_objects_v2(Bucket=name).get("Contents", [])}

    seen: dict[str, set[str]] = {}
    for number, given in enumerate(expect["s3"]):
        url = client + given.removeprefix("s3").replace("://b", f"://{name}", 1)
        plain = "/".join(part for part in given.removeprefix("s3://").split("/") if part)
        before = keys()
        for run in range(2):
            dest = tmp_path / f"{number}-{run}"
            if plain not in seen:
                for version in range(2):
                    publish(url, root / f"v{version}")
                seen[plain] = keys() - before
            pull(url, dest)
            exact(dest, expect, 1)
        # A store that had another URL already is the same one.
        assert keys() - before == (seen[plain] if not before & seen[plain] else set())
        prefix = plain.partition("/")[2]
        assert all(key.startswith(f"{prefix}/" if prefix else "") and "//" not in key for key in seen[plain])
    assert list(seen) == ["b", "b/p", "b/run [1] a", "b/é"]
    raw.close()


def test_p32_same_size_and_time_but_other_bytes_is_seen(
    bucket: Bucket, cases: Callable[[str], Path], tmp_path: Path
) -> None:
    """Names are by content or attempt, and everything that is read is checked: sizes and times decide nothing."""
    root = cases("p32_same_size_same_mtime")
    expect, dest = expected(root), tmp_path / "dest"
    publish(bucket, root / "v0")
    pull(bucket, dest)
    with Follower(bucket.url, CheckpointTarget(str(dest)), threads=1) as follower:
        publish(bucket, root / "A", base=str(root / "v0"))
        prepared = follower.prepare()
        assert prepared is not None
        other = f"{bucket.url}-b"
        publish(other, root / "v0")
        publish(other, root / "B", base=str(root / "v0"))
        prepared.discard()
    with pytest.raises(DeltaError):
        pull(other, dest)  # another store's lineage
    exact(dest, expect, 0)
    fresh = tmp_path / "fresh"
    pull(other, fresh)
    exact(fresh, expect, 1, "B")


def test_spliced_shard_is_named_and_nothing_is_written(trial: Trial, chain: Path, tmp_path: Path) -> None:
    store, dest = trial.store(), tmp_path / "dest"
    publish(store, chain / "v0")
    pull(store, dest)
    publish(store, chain / "v1", base=str(chain / "v0"))
    trial.faults.reset(lambda _, line: "splice" if line.startswith("GET") and ".safetensors" in line else "")
    before = make_cases.tree_digest(dest)
    with pytest.raises(IntegrityError, match=r"version 1: shard data/.*: checksum differs.*; fetch it again"):
        pull(store, dest)
    assert make_cases.tree_digest(dest) == before


def test_slow_store_is_waited_for(trial: Trial, chain: Path, tmp_path: Path) -> None:
    trial.faults.delay_s = 0.05
    trial.faults.reset(lambda _, __: "delay")
    publish(trial.store(), chain / "v0")
    assert pull(trial.store(), tmp_path / "dest") == 0
    exact(tmp_path / "dest", expected(chain), 0)


# ---------------------------------------------------------------- followers of a bucket


def data_key(bucket: Bucket, version: int) -> str:
    """Return the key of a version's first shard."""
    return bucket.objects(f"data/{version:020d}-")[0]


def flip(bucket: Bucket, version: int) -> None:
    """Change one byte of a version's first shard, or change it back."""
    key, store = data_key(bucket, version), bucket.store()
    raw = bytearray(read(store, key, limit=1 << 20))
    raw[-1] ^= 1
    store.put(key, [raw], if_absent=False)


def test_p21_payload_that_shows_late_is_waited_for(
    bucket: Bucket, cases: Callable[[str], Path], tmp_path: Path
) -> None:
    store = bucket.store()
    root, told, hidden = cases("p21_manifest_before_shards"), Told(), list[str]()
    expect, dest = expected(root), tmp_path / "dest"
    publish(store, root / "v0")

    def show_manifest_only() -> None:
        hidden.append("data/00000000000000000001-")
        publish(store, root / "v1", base=str(root / "v0"))

    acts = [show_manifest_only, lambda: exact(dest, expect, 0), hidden.clear, lambda: None]
    watcher, _ = follow(store, dest, *acts, mode="replace", told=told, wrap=lambda s: Hiding(s, hidden))
    assert told.lines("error")
    assert all("data/00000000000000000001-" in line for line in told.lines("error"))
    assert (watcher.state.applied, watcher.state.last_error) == (1, None)
    exact(dest, expect, 1)


class Meanwhile:
    """A store that does something once, when a key that begins so is about to be read."""

    def __init__(self, store: Store, prefix: str, act: Callable[[], object]) -> None:
        self.store, self.prefix, self.acts = store, prefix, [act]
        self._lock = threading.Lock()

    def get(self, key: str, out: memoryview) -> int:
        with self._lock:
            if key.startswith(self.prefix) and self.acts:
                self.acts.pop()()
        return self.store.get(key, out)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_p22_reader_whose_way_is_pruned_gets_there_by_the_newer_anchor(
    bucket: Bucket, cases: Callable[[str], Path], tmp_path: Path
) -> None:
    store = bucket.store()
    root, dest = cases("p22_prune_race"), tmp_path / "dest"
    for version in range(9):
        publish(store, root / f"v{version}", base=str(root / f"v{version - 1}") if version else None)
    pull(store, dest, 2)

    def meanwhile() -> None:
        make_anchor(store, 7)
        prune_store(store, keep=2, dry_run=False, grace_s=0.0)
        assert {int(key.split("/")[1][:20]) for key in bucket.objects("data/")} == {7, 8}

    slow: Any = Meanwhile(store, "data/00000000000000000005-", meanwhile)
    with Follower(slow, CheckpointTarget(str(dest)), threads=1) as follower:
        prepared = follower.prepare()
        assert prepared is not None
        assert (prepared.plan.anchor, [step.version for step in prepared.plan.steps]) == (7, [8])
        prepared.apply()
    exact(dest, expected(root), 8)


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_p24_of_four_copies_pulled_at_once_the_damaged_one_is_named_and_the_others_are_exact(
    where: str, bucket: Bucket, cases: Callable[[str], Path]
) -> None:
    root = cases("p24_rank_failure")
    expect, url = expected(root), bucket.store() if where == "bucket" else open_store(root / "store")
    for version in (0, 1):
        publish(url, root / f"v{version}")

    def run(rank: int) -> int | DeltaError | None:
        try:
            return pull(url, root / f"rank{rank}")
        except DeltaError as exc:
            return exc

    before = make_cases.tree_digest(root / "rank2")
    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(run, range(4)))
    failed = ended.pop(2)
    assert ended == [1, 1, 1]
    assert isinstance(failed, ChainError)
    assert f"{root}/rank2 holds no version of this store" in str(failed)
    assert make_cases.tree_digest(root / "rank2") == before
    assert pull(url, root / "rank2", reseed=True) == 1
    for rank in range(4):
        exact(root / f"rank{rank}", expect, 1)


def test_p40_of_two_pulls_at_once_one_works(bucket: Bucket, cases: Callable[[str], Path], tmp_path: Path) -> None:
    store = bucket.store()
    root = cases("p40_overlap_lock")
    for version in range(3):
        publish(store, root / f"v{version}", base=str(root / f"v{version - 1}") if version else None)
    for number in range(3):
        dest, barrier = tmp_path / str(number), threading.Barrier(2)

        def run(_: int, dest: Path = dest, barrier: threading.Barrier = barrier) -> int | DeltaError | None:
            barrier.wait(30)
            try:
                return pull(store, dest)
            except Busy as exc:
                return exc

        with ThreadPoolExecutor(2) as pool:
            ended = list(pool.map(run, range(2)))
        assert ended.count(2) == 1, ended
        assert all(end in (2, None) or "is held by another process" in str(end) for end in ended)
        exact(dest, expected(root), 2)


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    warm = Children(tmp_path_factory.mktemp("children"))
    yield warm
    warm.close()


def test_p40_a_killed_pull_blocks_nobody(
    bucket: Bucket, cases: Callable[[str], Path], children: Children, tmp_path: Path
) -> None:
    store = bucket.store()
    root, dest = cases("p40_overlap_lock"), tmp_path / "dest"
    for version in range(3):
        publish(store, root / f"v{version}", base=str(root / f"v{version - 1}") if version else None)
    pull(store, dest, 1)
    there = ENVIRONMENT | {"AWS_ENDPOINT_URL": bucket.server.endpoint}
    killed = children.run("pull", bucket.url, dest, **there, FAULT="replace:2:KILL", FAULT_MATCH=str(dest))
    assert killed.exit_code == -signal.SIGKILL, killed.text
    assert recorded(dest) is None
    assert pull(store, dest) in (2, None)
    exact(dest, expected(root), 2)


def test_p33_without_locks_nothing_is_pulled(bucket: Bucket, cases: Callable[[str], Path], children: Children) -> None:
    store = bucket.store()
    root = cases("p33_no_flock_exdev")
    for version in (0, 1):
        publish(store, root / f"v{version}")
    there = ENVIRONMENT | {"AWS_ENDPOINT_URL": bucket.server.endpoint}
    before = make_cases.tree_digest(root / "local")
    child = children.run("pull", bucket.url, root / "local", **there, FAULT="flock:*:ENOLCK")
    assert child.exit_code == ConfigError.exit_code, child.text
    assert "--lock" in child.text
    assert make_cases.tree_digest(root / "local") == before
    name = make_cases.shard_name(1, 2)
    child = children.run("pull", bucket.url, root / "local", **there, FAULT="replace:1:EXDEV", FAULT_MATCH=name)
    assert child.exit_code == 0, child.text
    exact(root / "local", expected(root), 1)


def test_p41_bad_payload_and_a_failing_hook_are_logged_and_survived(
    bucket: Bucket, cases: Callable[[str], Path], tmp_path: Path
) -> None:
    store = bucket.store()
    root, told, dest = cases("p41_watch_survives"), Told(), tmp_path / "dest"
    expect = expected(root)

    def publish_next(version: int) -> Callable[[], object]:
        return lambda: publish(store, root / f"v{version}", base=str(root / f"v{version - 1}"))

    def bad_v2() -> None:
        publish_next(2)()
        flip(bucket, 2)

    def repair_after_two_failures() -> bool:
        if len(told.lines("error")) < 2:
            return False
        flip(bucket, 2)
        return True

    def holding(version: int) -> Callable[[], None]:
        return lambda: exact(dest, expect, version)

    publish(store, root / "v0")
    publish_next(1)()
    hook = (
        f'echo "$DELTACKPT_VERSION" >>{root}/hooks; [ $DELTACKPT_VERSION != 3 ] || [ $(grep -c 3 {root}/hooks) != 1 ]'
    )
    acts = [
        bad_v2, repair_after_two_failures, holding(2), publish_next(3), holding(3), publish_next(4), holding(4),
    ]  # fmt: skip
    watcher, _ = follow(store, dest, *acts, mode="replace", command=hook, told=told)
    errors = told.lines("error")
    assert [("version 2 cannot be had" in line, "the hook (--exec) for version 3 " in line) for line in errors] == [
        (True, False), (True, False), (False, True)
    ]  # fmt: skip
    assert (root / "hooks").read_text().split() == ["1", "2", "3", "3", "4"]
    assert (watcher.state.applied, watcher.state.last_error, watcher.state.failures) == (4, None, 3)
