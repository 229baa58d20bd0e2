"""Publishers: authority, epochs, commits without an answer, bases, anchors by the byte rule."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_cases
import numpy as np
import pytest
from faults import FaultStore
from helpers import cli_good, data_files, manifest_of, recorded, refused, visible
from safetensors.numpy import load_file

from deltackpt import publish as publish_module
from deltackpt import writer as writer_module
from deltackpt.errors import AlreadyExists, ChainError, ConfigError, Fenced, StoreError, Unavailable
from deltackpt.manifest import Manifest
from deltackpt.publish import Publisher, publish_folder
from deltackpt.reader import Reader
from deltackpt.store import LocalStore, Store, open_store

Arrays = dict[str, "np.ndarray[Any, np.dtype[Any]]"]


@pytest.fixture(autouse=True)
def _no_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTACKPT_RUN_ID", raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def weights(version: int) -> Arrays:
    """32 KiB of weights of which 1 % differ from version to version."""
    made = {"a": np.zeros((64, 64), np.float32), "b": np.zeros(8192, np.int16)}
    for v in range(1, version + 1):
        rng = np.random.default_rng(v)
        made["a"].reshape(-1)[rng.choice(4096, 40, replace=False)] += v
        made["b"][rng.choice(8192, 80, replace=False)] += v
    return made


def pulled(store: Path, version: int | None = None) -> Arrays:
    """What a fresh host gets, through the safetensors library's own reader."""
    dest = store.with_name(f"pulled-{version}")
    shutil.rmtree(dest, ignore_errors=True)
    cli_good("pull", store, dest, *(() if version is None else ("--version", str(version))))
    found: Arrays = {}
    for path in sorted(dest.glob("*.safetensors")):
        found |= load_file(path)
    return found


def same(left: Arrays, right: Arrays) -> bool:
    return left.keys() == right.keys() and all(
        (left[n].dtype, left[n].shape, left[n].tobytes()) == (right[n].dtype, right[n].shape, right[n].tobytes())
        for n in left
    )


def faulty(monkeypatch: pytest.MonkeyPatch, store: Path) -> list[FaultStore]:
    """Let publishers open the store through one that can be told to fail; returns those that were opened."""
    made: list[FaultStore] = []

    def opened(url: str) -> Store:
        made.append(FaultStore(LocalStore(url)))
        return made[-1]

    monkeypatch.setattr(publish_module, "open_store", opened)
    monkeypatch.setattr(writer_module.time, "sleep", lambda _: None)
    assert not store.exists()
    return made


# ---------------------------------------------------------------- versions and what they hold


def test_versions_follow_each_other_and_each_is_exact(store: Path) -> None:
    with Publisher(str(store), anchors=False) as publisher:
        made = [publisher.publish(weights(v), step=10 * v, metadata={"reward": str(v)}) for v in range(4)]
    assert [(m.version, m.kind, m.base, m.step) for m in made] == [
        (0, "full", None, 0), (1, "delta", 0, 10), (2, "delta", 1, 20), (3, "delta", 2, 30),
    ]  # fmt: skip
    assert [m.totals.changed for m in made] == [4096 + 8192, 120, 120, 120]
    assert len({m.lineage for m in made}) == 1
    assert manifest_of(store, 2).metadata == {"reward": "2"}
    for v in range(4):
        assert same(pulled(store, v), weights(v))


def test_base_on_the_host_is_that_of_the_cpu_and_other_words_are_refused(store: Path) -> None:
    with Publisher(str(store), base_on="host") as publisher:
        for version in range(2):
            publisher.publish(weights(version))
    assert same(pulled(store), weights(1))
    with pytest.raises(ConfigError, match="base_on 'disk': expected device or host"):
        Publisher(str(store), base_on="disk")  # type: ignore[arg-type]  # what a user may pass


def test_what_is_changed_after_publish_does_not_matter(store: Path) -> None:
    params = weights(0)
    with Publisher(str(store), anchors=False) as publisher:
        publisher.publish(params)
        params["a"][:] = 7.0
        assert same(pulled(store), weights(0))
        publisher.publish(weights(1))
        params = weights(2)
        publisher.publish(params)
        params["b"][:] = 7
        publisher.publish(weights(3))
    assert same(pulled(store), weights(3))
    assert same(pulled(store, 2), weights(2))


def test_nothing_changed_is_an_empty_version(store: Path) -> None:
    with Publisher(str(store)) as publisher:
        publisher.publish(weights(0))
        made = publisher.publish(weights(0))
    assert (made.kind, made.base, made.shards, made.totals.changed) == ("empty", 0, (), 0)


def test_no_tensors_at_all_can_be_published_and_pulled(store: Path) -> None:
    with Publisher(str(store)) as publisher:
        assert publisher.publish({}).kind == "full"
        assert publisher.publish({}).kind == "empty"
    assert pulled(store) == {}
    assert recorded(store.with_name("pulled-None")) == 1


def test_arrays_of_ml_dtypes_and_strided_ones_arrive(store: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    grid = np.arange(24, dtype=np.float32).reshape(4, 6)

    def params(v: int) -> Arrays:
        return {
            "bf16": np.full(5, 1 + v, ml_dtypes.bfloat16),
            "e4m3": np.full(5, 1 + v, ml_dtypes.float8_e4m3fn),
            "cut": (grid + v)[:, ::2],
            "turned": (grid + v).T,
            "big": (grid + v).astype(">f4"),
        }

    with Publisher(str(store), anchors=False) as publisher:
        publisher.publish(params(0))
        publisher.publish(params(1))
    cli_good("pull", store, store.with_name("dest"))
    found = make_cases.read_st(store.with_name("dest") / "model.safetensors")[0]
    assert {n: (dtype, shape) for n, (dtype, shape, _) in found.items()} == {
        "bf16": ("BF16", (5,)), "e4m3": ("F8_E4M3", (5,)), "cut": ("F32", (4, 3)), "turned": ("F32", (6, 4)),
        "big": ("F32", (4, 6)),
    }  # fmt: skip
    expected = params(1) | {"big": params(1)["big"].astype("<f4")}
    assert {n: raw for n, (_, _, raw) in found.items()} == {n: a.tobytes() for n, a in expected.items()}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: p.pop("b"), ["tensor b is missing"]),
        (lambda p: p.update(c=np.zeros(1, np.int8)), ["tensor c is new"]),
        (lambda p: p.update(b=p["b"].astype(np.uint16)), ["tensor b is U16, was I16"]),
        (lambda p: p.update(b=p["b"].reshape(2, -1)), ["tensor b has shape [2, 4096], was [8192]"]),
        (lambda p: p.update(b=p["b"].astype(object)), ["tensor b", "object"]),
    ],
)
def test_params_that_do_not_fit_are_refused_and_the_next_publish_is_right(
    store: Path, change: Callable[[Arrays], object], named: list[str]
) -> None:
    bad = weights(1)
    change(bad)
    with Publisher(str(store), anchors=False) as publisher:
        publisher.publish(weights(0))
        refused(lambda: publisher.publish(bad), *named, error=ConfigError, store=store)
        publisher.publish(weights(1))
    assert same(pulled(store), weights(1))


def test_name_given_twice_is_refused(store: Path) -> None:
    pairs = [("a", np.zeros(2)), ("a", np.ones(2))]
    with Publisher(str(store)) as publisher:
        refused(lambda: publisher.publish(pairs), "tensor a", "duplicate", error=ConfigError, store=store)
    assert data_files(store) == []


# ---------------------------------------------------------------- serving


def serving_folder(root: Path) -> Path:
    folder = make_cases.write_ckpt(root / "serving", make_cases.tiny())
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer.json").chmod(0o600)
    return folder


def arrays_of(folder: Path, v: int = 0) -> Arrays:
    kinds = {"F32": np.float32, "BF16": "bfloat16"}
    import ml_dtypes

    found = {}
    for name, (dtype, shape, raw) in make_cases.read_ckpt(folder).items():
        made = np.frombuffer(raw, ml_dtypes.bfloat16 if dtype == "BF16" else kinds[dtype]).reshape(shape).copy()
        made.reshape(-1)[:v] += 1
        found[name] = made
    return found


def test_serving_checkpoint_gives_files_index_and_side_files(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("ml_dtypes")
    serving = serving_folder(tmp_path)
    with Publisher(str(store), serving=str(serving), anchors=False) as publisher:
        publisher.publish(arrays_of(serving, 1))
        publisher.publish(arrays_of(serving, 2))
    dest = tmp_path / "dest"
    cli_good("pull", store, dest)
    names = [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip
    assert sorted(p.name for p in dest.iterdir() if p.name != ".deltackpt") == names
    assert (dest / "tokenizer.json").stat().st_mode & 0o777 == 0o600
    assert make_cases.read_st(dest / names[1])[1] == {"format": "pt"}
    expected = {n: a.tobytes() for n, a in arrays_of(serving, 2).items()}
    assert {n: raw for n, (_, _, raw) in make_cases.read_ckpt(dest).items()} == expected


def test_serving_checkpoint_is_followed_by_a_publisher_that_goes_on_too(store: Path, tmp_path: Path) -> None:
    """A publisher that went on with a stream kept the files of the version before, whatever it was told to follow."""
    pytest.importorskip("ml_dtypes")
    serving = serving_folder(tmp_path)
    for v in range(2):
        with Publisher(str(store), run_id="r", serving=None if v == 0 else str(serving), anchors=False) as publisher:
            publisher.publish(arrays_of(serving, v))
    cli_good("pull", store, tmp_path / "dest")
    assert sorted(p.name for p in (tmp_path / "dest").glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip
    assert (tmp_path / "dest" / "tokenizer.json").exists()


def test_params_that_drift_from_the_serving_checkpoint_are_refused_by_name(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("ml_dtypes")
    serving = serving_folder(tmp_path)
    good = arrays_of(serving)
    bad = good | {"lm_head.weight": good["lm_head.weight"].astype(np.float32)}
    with Publisher(str(store), serving=str(serving)) as publisher:
        refused(lambda: publisher.publish(bad), "lm_head.weight is F32, was BF16", error=ConfigError, store=store)
        assert visible(store) == []
        publisher.publish(good)
    assert visible(store) == [0]


# ---------------------------------------------------------------- commits that fail


def test_base_advances_only_after_the_commit(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every put of a publish: it fails for good once, nothing is visible or left, and the next publish is right."""
    with pytest.MonkeyPatch.context() as patch:
        (counting,) = publish_once(faulty(patch, store), store)
        puts = [op for op in counting.operations if op.startswith("put ")]
        assert puts[-1] == f"put manifests/{1:020d}.json"
        assert len(puts) == 2
    for at in range(1, len(puts) + 1):
        target = store.with_name(f"store{at}")
        made = faulty(monkeypatch, target)
        with Publisher(str(target), anchors=False) as publisher:
            publisher.publish(weights(0))
            (fault,) = made
            fault.kinds, fault.operations[:] = ("put",), []
            fault.at, fault.error = at, lambda: StoreError("injected: no space")
            refused(lambda p=publisher: p.publish(weights(1)), "no space", error=StoreError, store=target)
            fault.at = None
            publisher.publish(weights(2))
        assert visible(target) == [0, 1]
        assert same(pulled(target), weights(2))
        made.clear()


def publish_once(made: list[FaultStore], store: Path) -> list[FaultStore]:
    with Publisher(str(store), anchors=False) as publisher:
        publisher.publish(weights(0))
        made[0].operations.clear()
        publisher.publish(weights(1))
    return made


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_manifest_put_without_an_answer_is_settled_by_putting_it_again(
    store: Path, monkeypatch: pytest.MonkeyPatch, version: int, when: Any
) -> None:
    made = faulty(monkeypatch, store)
    with Publisher(str(store), anchors=False) as publisher:
        for v in range(version):
            publisher.publish(weights(v))
        (fault,) = made
        fault.kinds, fault.when = ("put",), when
        fail_manifests(fault, times=3)
        assert publisher.publish(weights(version)).version == version
        assert publisher.publish(weights(version + 1)).version == version + 1
    assert visible(store) == list(range(version + 2))
    for v in range(version + 2):
        assert same(pulled(store, v), weights(v))


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_store_that_stays_silent_is_raised_and_settled_by_the_next_publish(
    store: Path, monkeypatch: pytest.MonkeyPatch, version: int, when: Any
) -> None:
    made = faulty(monkeypatch, store)
    with Publisher(str(store), anchors=False) as publisher:
        for v in range(version):
            publisher.publish(weights(v))
        (fault,) = made
        fault.kinds, fault.when = ("put",), when
        fail_manifests(fault, times=8)
        with pytest.raises(Unavailable, match="did not answer"):
            publisher.publish(weights(version))
        assert visible(store) == list(range(version + (when == "after")))
        assert publisher.publish(weights(version + 1)).version == version + 1
    for v in range(version + 2):
        assert same(pulled(store, v), weights(v))


def fail_manifests(fault: FaultStore, *, times: int) -> None:
    """Let the next puts of manifests fail in the store's way."""
    left, real = [times], fault.store.put

    def put(key: str, parts: Any, *, if_absent: bool = True) -> None:
        fails = key.startswith("manifests/") and left[0] > 0
        if fails:
            left[0] -= 1
        if not fails or (fault.when == "after" and left[0] == times - 1):
            real(key, parts, if_absent=if_absent)
        if fails:
            raise fault.error()

    fault.store.put = put  # type: ignore[method-assign]


# ---------------------------------------------------------------- two publishers


def test_publisher_is_fenced_by_one_that_claimed_an_epoch(store: Path) -> None:
    with Publisher(str(store), run_id="r", anchors=False) as first:
        first.publish(weights(0))
        with Publisher(str(store), run_id="r", anchors=False) as second:
            assert [manifest_of(store, v).epoch for v in visible(store)] == [0, 1]
            refused(lambda: first.publish(weights(1)), "epoch 1, this publisher 0", error=Fenced, store=store)
            assert second.publish(weights(2)).version == 2
        refused(lambda: first.publish(weights(1)), error=Fenced, store=store)
    assert same(pulled(store), weights(2))


def test_second_of_two_that_start_a_stream_together_loses(store: Path) -> None:
    with Publisher(str(store), anchors=False) as first, Publisher(str(store), anchors=False) as second:
        first.publish(weights(0))
        refused(lambda: second.publish(weights(1)), "version 0 exists already", error=AlreadyExists, store=store)
    assert same(pulled(store), weights(0))


# ---------------------------------------------------------------- authority


def test_run_id_goes_on_and_another_or_none_is_refused(store: Path) -> None:
    with Publisher(str(store), run_id="r1", anchors=False) as publisher:
        publisher.publish(weights(0))
    for other in ("r2", None):
        refused(
            lambda other=other: Publisher(str(store), run_id=other), "store is at version 0, written by run 'r1'",
            "--resume", "--new-lineage", error=ConfigError, store=store,
        )  # fmt: skip
    with Publisher(str(store), run_id="r1", anchors=False) as publisher:
        assert publisher.publish(weights(1)).run_id == "r1"


def test_run_id_may_come_from_the_environment(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACKPT_RUN_ID", "from-env")
    with Publisher(str(store), anchors=False) as publisher:
        assert publisher.publish(weights(0)).run_id == "from-env"
        assert manifest_of(store, 0).run_id == "from-env"


def test_without_run_ids_the_record_of_this_host_is_the_authority(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher(str(store), anchors=False) as publisher:
        publisher.publish(weights(0))
    with Publisher(str(store), anchors=False) as publisher:
        publisher.publish(weights(1))
    here = tmp_path / "other-host"
    monkeypatch.setenv("XDG_STATE_HOME", str(here))
    refused(
        lambda: Publisher(str(store)), "store is at version 2, written by another host or process", "--resume",
        error=ConfigError, store=store,
    )  # fmt: skip
    with Publisher(str(store), resume=True, anchors=False) as publisher:
        publisher.publish(weights(2))
    # From now on it is this host's.
    with Publisher(str(store), anchors=False) as publisher:
        publisher.publish(weights(3))
    assert same(pulled(store), weights(3))


def test_damaged_record_of_this_host_proves_nothing(store: Path) -> None:
    with Publisher(str(store), anchors=False) as publisher:
        publisher.publish(weights(0))
    path = Path(writer_module.host_record_path(Reader(open_store(store)).info.store_id))
    path.write_bytes(b"{")
    refused(lambda: Publisher(str(store)), "another host or process", error=ConfigError, store=store)


def test_host_record_that_cannot_be_written_is_refused_before_anything_shows(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with Publisher(str(store), anchors=False) as publisher:
        refused(lambda: publisher.publish(weights(0)), "XDG_STATE_HOME", error=ConfigError, store=store)
        assert (visible(store), data_files(store)) == ([], [])
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        publisher.publish(weights(0))
    assert same(pulled(store), weights(0))


# ---------------------------------------------------------------- going on


def kinds(store: Path) -> list[tuple[str, int | None]]:
    return [(m.kind, m.base) for m in (manifest_of(store, v) for v in visible(store))]


def start(store: Path, *, versions: int = 3) -> None:
    with Publisher(str(store), run_id="r", anchors=False) as publisher:
        for v in range(versions):
            publisher.publish(weights(v), step=v)


def test_publisher_that_goes_on_finds_the_head_in_its_own_weights(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(store)
    with Publisher(str(store), run_id="r", anchors=False) as publisher:
        made = publisher.publish(weights(2), step=3)
        assert (made.version, made.kind, made.totals.changed) == (4, "empty", 0)
        publisher.publish(weights(3), step=4)
    assert same(pulled(store), weights(3))


def test_publisher_that_goes_on_from_an_earlier_version_commits_a_rewind(store: Path) -> None:
    start(store)
    with Publisher(str(store), run_id="r", resume=True, anchors=False) as publisher:
        made = publisher.publish(weights(1), step=1)
        assert (made.kind, made.base, made.shards) == ("rewind", 1, ())
        assert publisher.publish(weights(4), step=2).kind == "delta"
    assert kinds(store)[3:] == [("empty", 2), ("rewind", 1), ("delta", 4)]
    assert same(pulled(store, 4), weights(1))
    assert same(pulled(store, 5), weights(4))


def test_rewind_that_is_not_committed_leaves_no_base_behind(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base was the trainer's weights before the rewind to them was committed, and the next delta was garbage."""
    start(store)
    made: list[FaultStore] = []

    def opened(url: str) -> Store:
        made.append(FaultStore(LocalStore(url)))
        return made[-1]

    monkeypatch.setattr(publish_module, "open_store", opened)
    with Publisher(str(store), run_id="r", resume=True, anchors=False) as publisher:
        (fault,) = made
        fault.kinds, fault.at, fault.error = ("put",), 1, lambda: StoreError("injected: no space")
        fault.operations.clear()
        refused(lambda: publisher.publish(weights(1), step=1), "no space", error=StoreError, store=store)
        fault.at = None
        publisher.publish(weights(4), step=2)
    assert same(pulled(store), weights(4))


def test_publisher_that_goes_on_with_other_weights_rebuilds_the_head(store: Path) -> None:
    start(store)
    with Publisher(str(store), run_id="r", anchors=False) as publisher:
        made = publisher.publish(weights(3), step=3)
    assert (made.version, made.kind, made.base, made.totals.changed) == (4, "delta", 3, 120)
    assert same(pulled(store), weights(3))


def test_step_that_falls_is_refused_without_resume(store: Path) -> None:
    start(store)
    with Publisher(str(store), run_id="r", anchors=False) as publisher:
        refused(
            lambda: publisher.publish(weights(3), step=1), "step 1 is before step 2 of version 3", "--resume",
            error=ConfigError, store=store,
        )  # fmt: skip
        assert publisher.publish(weights(3), step=2).step == 2
        assert publisher.publish(weights(4)).step is None


def test_resume_allows_one_fall_of_the_step_and_not_a_second(store: Path) -> None:
    start(store)
    with Publisher(str(store), run_id="r", resume=True, anchors=False) as publisher:
        publisher.publish(weights(3), step=1)
        refused(lambda: publisher.publish(weights(4), step=0), "step 0 is before step 1", error=ConfigError)


def test_new_lineage_starts_with_a_full_version(store: Path) -> None:
    start(store)
    with Publisher(str(store), new_lineage=True, anchors=False) as publisher:
        full = publisher.publish({"other": np.zeros(4, np.float32)}, step=0)
        publisher.publish({"other": np.ones(4, np.float32)}, step=1)
    assert (full.version, full.kind, full.base, full.epoch) == (3, "full", None, 1)
    lineages = [manifest_of(store, v).lineage for v in visible(store)]
    assert lineages[0] == lineages[2] != lineages[3] == lineages[4]
    assert same(pulled(store), {"other": np.ones(4, np.float32)})


# ---------------------------------------------------------------- anchors


def test_anchor_is_made_in_the_background_by_the_byte_rule_and_opens_with_the_reference_reader(store: Path) -> None:
    def params(version: int) -> Arrays:
        """32 KiB of noise, of which each version replaces a quarter."""
        seeds = [(version - n) // 4 * 4 + n for n in range(4)]
        return {
            f"t{n}": np.random.default_rng(seed).integers(0, 65536, 4096, np.uint16) for n, seed in enumerate(seeds)
        }

    with Publisher(str(store)) as publisher:
        for v in range(4, 11):
            publisher.publish(params(v))
            publisher.close()  # waits for the anchor, if one is being made
    reader = Reader(open_store(store))
    reader.load()
    stored = [manifest_of(store, v).totals.stored for v in range(7)]
    # Two deltas are more than half of 32 KiB, one is not.
    assert all(8192 < nbytes < 16384 for nbytes in stored[1:])
    assert sorted(reader.anchors()) == [0, 2, 4, 6]
    for version in (0, 2, 4, 6):
        anchor = reader.anchor(version).anchor
        assert anchor.folder is not None
        found = {}
        for path in sorted((store / anchor.folder).glob("*.safetensors")):
            found |= load_file(path)
        assert same(found, params(version + 4))


def test_anchors_can_be_left_out(store: Path) -> None:
    with Publisher(str(store), anchors=False) as publisher:
        for v in range(12):
            publisher.publish(weights(v))
    assert not (store / "anchors").exists()


def test_error_of_the_background_comes_out_of_the_next_call(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise StoreError("injected: no space for an anchor")

    monkeypatch.setattr(publish_module, "make_anchor", broken)
    monkeypatch.setattr(publish_module, "anchor_due", lambda reader: True)
    publisher = Publisher(str(store))
    publisher.publish(weights(0))
    with pytest.raises(StoreError, match="no space for an anchor"):
        publisher.close()
    publisher.publish(weights(1))
    assert publisher._background is not None
    publisher._background._thread.join()
    with pytest.raises(StoreError, match="no space for an anchor"):
        publisher.publish(weights(2))
    assert visible(store) == [0, 1]
    monkeypatch.setattr(publish_module, "anchor_due", lambda reader: False)
    publisher.publish(weights(2))
    publisher.close()
    assert same(pulled(store), weights(2))


def test_anchor_of_which_is_not_known_whether_it_is_due_fails_no_committed_version(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The version was committed and the call raised: who published it again had it twice."""

    def silent(_reader: Reader) -> bool:
        raise Unavailable("injected: no answer")

    monkeypatch.setattr(publish_module, "anchor_due", silent)
    with Publisher(str(store)) as publisher:
        assert publisher.publish(weights(0)).version == 0
        assert publisher.publish(weights(1)).version == 1
    assert "version 1 is committed, but whether an anchor is due is not known: injected: no answer" in caplog.text
    assert same(pulled(store), weights(1))


# ---------------------------------------------------------------- folders


def folder(root: Path, version: int) -> Path:
    from safetensors.numpy import save_file

    path = root / f"v{version}"
    path.mkdir()
    save_file(weights(version), path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text("{}")
    return path


def publish_chain(root: Path, store: Path, versions: int, **options: Any) -> list[Manifest]:
    return [publish_folder(str(folder(root, v)), str(store), run_id="r", **options) for v in range(versions)]


def test_anchor_by_reference_stores_no_weights_and_is_read_from_where_they_are(store: Path, tmp_path: Path) -> None:
    publish_chain(tmp_path, store, 2, anchor_ref=True, anchors=False)
    assert [Path(name).name for name in data_files(store)] == ["anchor.json", "00000.safetensors"]
    dest = tmp_path / "dest"
    refused(["pull", store, dest], "by reference", "--anchor-source", error=ConfigError)
    cli_good("pull", store, dest, "--anchor-source", tmp_path / "v0")
    assert same(load_file(dest / "model.safetensors"), weights(1))
    refused(
        ["pull", store, tmp_path / "fresh", "--anchor-source", folder(tmp_path, 5)],
        f"{tmp_path}/v5 does not hold the files of the anchor of version 0 (made from {tmp_path}/v0)",
        "a and 1 more in model.safetensors differs",
        error=ChainError,
    )
    with open(tmp_path / "v5" / "model.safetensors", "ab") as file:
        file.write(b"0")
    refused(
        ["pull", store, tmp_path / "fresh", "--anchor-source", tmp_path / "v5"],
        "model.safetensors has 32937 bytes there, 32936 in the anchor",
        error=ConfigError,
    )
    assert not (tmp_path / "fresh").exists()


@pytest.mark.parametrize("how", ["remembered", "named", "rebuilt", "mirror"])
def test_base_of_a_folder_is_proven_however_it_is_found(store: Path, tmp_path: Path, how: str) -> None:
    first = folder(tmp_path, 0)
    options: dict[str, Any] = {"run_id": "r", "anchors": False}
    publish_folder(str(first), str(store), **options)
    if how == "named":
        first = first.rename(tmp_path / "moved")
        options["base"] = str(first)
    elif how == "rebuilt":
        shutil.rmtree(first)
    elif how == "mirror":
        shutil.rmtree(first)
        options["mirror"] = str(tmp_path / "mirror")
    made = publish_folder(str(folder(tmp_path, 1)), str(store), **options)
    assert (made.kind, made.totals.changed) == ("delta", 120)
    assert same(pulled(store), weights(1))
    if how == "mirror":
        assert same(load_file(tmp_path / "mirror" / "model.safetensors"), weights(1))


def test_checkpoint_overwritten_by_the_trainer_is_never_taken_for_the_base(store: Path, tmp_path: Path) -> None:
    path = folder(tmp_path, 0)
    publish_folder(str(path), str(store), run_id="r", anchors=False)
    shutil.copy(folder(tmp_path, 1) / "model.safetensors", path / "model.safetensors")
    made = publish_folder(str(path), str(store), run_id="r", anchors=False)
    assert (made.kind, made.totals.changed) == ("delta", 120)
    assert same(pulled(store), weights(1))


def test_named_base_that_does_not_hold_the_head_is_refused_by_tensor(store: Path, tmp_path: Path) -> None:
    publish_chain(tmp_path, store, 2, anchors=False)
    later = folder(tmp_path, 2)
    refused(
        lambda: publish_folder(str(later), str(store), run_id="r", base=str(tmp_path / "v0")),
        "does not hold version 1: it holds version 0", error=ConfigError, store=store, local=tmp_path / "v0",
    )  # fmt: skip
    publish_folder(str(later), str(store), run_id="r", base=str(tmp_path / "v1"), anchors=False)
    assert same(pulled(store), weights(2))


def test_file_beside_its_store_can_be_published(tmp_path: Path) -> None:
    """A single file was refused because the store lay in the folder that holds it."""
    source = folder(tmp_path, 0) / "model.safetensors"
    file = tmp_path / "model.safetensors"
    shutil.copy(source, file)
    assert publish_folder(str(file), str(tmp_path / "store"), run_id="r").side_files == ()
    assert same(pulled(tmp_path / "store"), weights(0))


def test_resume_of_a_folder_that_holds_an_earlier_version_is_a_rewind(store: Path, tmp_path: Path) -> None:
    publish_chain(tmp_path, store, 3, anchors=False)
    made = publish_folder(str(tmp_path / "v1"), str(store), resume=True, anchors=False)
    assert (made.version, made.kind, made.base, made.run_id) == (3, "rewind", 1, "r")
    assert same(pulled(store), weights(1))


def test_checkpoint_that_changes_while_it_is_read_is_refused(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_chain(tmp_path, store, 1, anchors=False)
    path, later = folder(tmp_path, 1), folder(tmp_path, 2) / "model.safetensors"
    real = publish_module._folder_delta

    def slow(*arguments: Any, **options: Any) -> Any:
        draft = real(*arguments, **options)
        (path / "model.safetensors").unlink()
        shutil.copy(later, path / "model.safetensors")
        return draft

    with monkeypatch.context() as patch:
        patch.setattr(publish_module, "_folder_delta", slow)
        refused(
            lambda: publish_folder(str(path), str(store), run_id="r"), "model.safetensors changed while it was read",
            error=ConfigError, store=store,
        )  # fmt: skip
    publish_folder(str(path), str(store), run_id="r", anchors=False)
    assert same(pulled(store), weights(2))
