"""Publishing weights: from a checkpoint folder, and from a trainer's tensors.

The base advances only after the commit, and by the very delta that was published, so base and store cannot drift apart.
Longer than most modules because both ways end in the same draft and commit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from deltackpt import backend
from deltackpt import codec as codecs
from deltackpt.anchor import Weights, anchor_due, full_draft, make_anchor, scratch_folder
from deltackpt.backend import Device, Encoding
from deltackpt.chain import Entry
from deltackpt.checkpoint import Folder, addresses, default_placement, mapped, open_folder
from deltackpt.digest import U64, fp_hex, state_fingerprint
from deltackpt.errors import ConfigError, DeltaError
from deltackpt.folder import CheckpointTarget, difference, fingerprint_folder
from deltackpt.follow import Follower
from deltackpt.layout import Layout
from deltackpt.manifest import ANS, Manifest, Placement
from deltackpt.shard import EncodedGroup
from deltackpt.store import LocalStore, Store, open_store
from deltackpt.writer import SHARD_BYTES, Draft, Upload, Writer, attempt

if TYPE_CHECKING:
    from deltackpt.board import Group
    from deltackpt.collective import Collective
    from deltackpt.holding import Pieces
    from deltackpt.tensors import Choice, Live, Params, Roster

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Encoded:
    """What was put. change: fingerprint difference of each tensor; changed: elements; changed_bytes: their bytes."""

    change: U64
    groups: frozenset[int]
    changed: int
    changed_bytes: int
    times: dict[str, float]
    needs: tuple[str, ...]


def _put_all(writer: Writer, upload: Upload, layout: Layout, groups: Generator[EncodedGroup, None, None]) -> _Encoded:
    """Put all groups as they come, several shards at a time."""
    began = time.perf_counter()
    change, numbers = np.zeros(len(layout.names), np.uint64), set()
    changed = changed_bytes = 0
    ans = False
    waiting: list[EncodedGroup] = []
    # Closed before the caller gives back the memory that is compared.
    with upload.parallel(), contextlib.closing(groups):
        for group in groups:
            change[group.tensor] += group.fingerprint
            numbers.add(group.group)
            changed += group.changed
            ans = ans or any(frame.codec == codecs.ANS for frame in group.frames)
            changed_bytes += group.changed * layout.groups[group.group].width
            waiting.append(group)
            if sum(g.stored for g in waiting) >= SHARD_BYTES:
                upload.put(waiting)
                waiting = []
        if waiting:
            upload.put(waiting)
        encoded = time.perf_counter()
    times = {"encode_ms": (encoded - began) * 1e3, "upload_ms": (time.perf_counter() - encoded) * 1e3}
    return _Encoded(change, frozenset(numbers), changed, changed_bytes, times, (ANS,) if ans else ())


def _delta(
    writer: Writer,
    upload: Upload,
    source: Weights,
    groups: Generator[EncodedGroup, None, None],
    times: dict[str, float] | None = None,
) -> Draft:
    """Return the draft of what leads from the head to the source, by the groups in which they differ."""
    head = writer.head
    assert head is not None
    layout = source.layout
    done = _put_all(writer, upload, layout, groups)
    state = int(head.manifest.state, 16) + state_fingerprint(layout.weights, done.change)
    return Draft(
        "delta" if done.groups else "empty", layout, source.placement, source.side_files, state,
        head.manifest.version, upload.shards, done.groups, done.changed, done.changed_bytes,
        times=(times or {}) | done.times, needs=done.needs,
    )  # fmt: skip


# ---------------------------------------------------------------- from a checkpoint folder


def publish_folder(
    checkpoint: str,
    url: str | Store,
    *,
    base: str | None = None,
    mirror: str | None = None,
    step: int | None = None,
    run_id: str | None = None,
    resume: bool = False,
    new_lineage: bool = False,
    relayout: bool = False,
    anchor_ref: bool = False,
    anchor_source: str | None = None,
    anchors: bool = True,
    codec: str = "zstd",
    form: str = "sparse",
    scratch: str | None = None,
    metadata: Mapping[str, str] | None = None,
    threads: int | None = None,
) -> Manifest:
    """Publish a checkpoint folder as the next version of the store at `url`.

    base: a folder that holds the head; without it the folder published last, if it still holds the head, or a copy
    rebuilt from the store under `scratch`. A fingerprint proves the base each time. mirror: a folder of the caller's
    that is brought to the head, serves as the base and is brought to the new version: for trainers that overwrite
    their checkpoint. anchor_ref: a full version leaves the weights where they are and names them by digest.
    anchor_source: folder that holds the files of such a version, where the base must be rebuilt from it.
    """
    if base is not None and mirror is not None:
        raise ConfigError("base and mirror are given; one folder can be the base")
    folder, store = open_folder(checkpoint), open_store(url)
    if os.path.isdir(checkpoint):
        _require_apart(folder, store)
    writer = Writer(store, run_id=run_id, resume=resume, new_lineage=new_lineage, threads=threads)
    writer.require_step(step)
    head = writer.head
    files = [folder.file_path(n) for n in range(len(folder.checkpoint.placement.files))]
    full = head is None or new_lineage
    if head is not None and not full:
        old = writer.reader.layout(head.manifest.layout)
        if old.digest != folder.checkpoint.layout.digest:
            if not relayout:
                old.require_same(folder.checkpoint.layout)
            full = True
    with mapped(files) as maps, attempt(writer) as upload:
        source = Weights(
            folder.checkpoint.layout,
            folder.checkpoint.placement,
            writer.side_files(folder),
            addresses(folder.checkpoint, maps),
        )
        if full:
            draft = full_draft(writer, upload, source, folder if anchor_ref else None)
        else:
            if mirror is not None:
                _bring(mirror, url, head, anchor_source, threads)
            old_folder = _base(writer, base or mirror, scratch, anchor_source)
            draft = _folder_delta(writer, upload, source, old_folder, codec=codec, form=form)
        folder.require_unchanged()
        manifest = writer.commit(draft, step=step, metadata=metadata)
    writer.remember_checkpoint(folder.path)
    if anchors and not full:
        _add_anchor(writer, url, scratch, anchor_source)
    if mirror is not None:
        _bring(mirror, url, writer.head, anchor_source, threads)
    return manifest


def _require_apart(folder: Folder, store: Store) -> None:
    """Raise ConfigError for a store inside the checkpoint: its files would be published as side files."""
    if isinstance(store, LocalStore):
        outer, inner = os.path.realpath(folder.path), os.path.realpath(store.root)
        if os.path.commonpath((outer, inner)) == outer:
            raise ConfigError(
                f"the store {store.root} lies inside the checkpoint {folder.path}; name one outside of it"
            )


def _add_anchor(writer: Writer, url: str | Store, scratch: str | None, anchor_source: str | None) -> None:
    """Make an anchor of the version that was just committed if one is due; what fails here does not undo the commit."""
    assert writer.head is not None
    version = writer.head.manifest.version
    try:
        if anchor_due(writer.reader):
            make_anchor(url, version, scratch=scratch, anchor_source=anchor_source, threads=writer.reader.threads)
    except DeltaError as exc:
        _log.warning("version %d is committed, but an anchor that is due was not made: %s", version, exc)


def _bring(path: str, url: str | Store, entry: Entry | None, anchor_source: str | None, threads: int | None) -> None:
    """Bring a folder to a version; weights of no version are replaced."""
    assert entry is not None
    with Follower(url, CheckpointTarget(path), anchor_source=anchor_source, threads=threads) as follower:
        prepared = follower.prepare(entry.manifest.version, reseed=True)
        if prepared is not None:
            prepared.apply()


def _folder_delta(
    writer: Writer,
    upload: Upload,
    source: Weights,
    base: contextlib.AbstractContextManager[Folder],
    *,
    codec: str,
    form: str,
) -> Draft:
    began = time.perf_counter()
    if writer.resume and (rewind := _rewind(writer, source)):
        return rewind
    with base as held:
        files = [held.file_path(n) for n in range(len(held.checkpoint.placement.files))]
        with mapped(files) as maps:
            times = {"base_ms": (time.perf_counter() - began) * 1e3}
            old = addresses(held.checkpoint, maps)
            threads = writer.reader.threads
            groups = backend.encode(source.layout, old, source.addresses, codec=codec, form=form, threads=threads)
            draft = _delta(writer, upload, source, groups, times)
        held.require_unchanged()
        return draft


def _rewind(writer: Writer, source: Weights) -> Draft | None:
    """Return the draft of a rewind if the new weights are an earlier version's, bit for bit."""
    table = backend.fingerprints(source.layout, source.addresses, threads=writer.reader.threads)
    state = state_fingerprint(source.layout.weights, table)
    version = writer.reader.identify(source.layout.digest, state)
    head = writer.head
    assert head is not None
    if version is None:
        return None
    kind: Literal["empty", "rewind"] = "empty" if version == head.manifest.version else "rewind"
    if kind == "rewind" and not writer.reader.reachable(version):
        # Pruned: no follower could get there. A delta from the head can be followed.
        return None
    return Draft(kind, source.layout, source.placement, source.side_files, state, version)


@contextlib.contextmanager
def _base(writer: Writer, base: str | None, scratch: str | None, anchor_source: str | None) -> Iterator[Folder]:
    """Yield a folder that is proven to hold the head."""
    head = writer.head
    assert head is not None
    if base is not None:
        folder = open_folder(base)
        if not _holds(writer, folder, head):
            table = fingerprint_folder(folder, writer.reader.threads)
            what = difference(writer.reader, folder.checkpoint.layout, table)
            raise ConfigError(
                f"--base {base} does not hold version {head.manifest.version}: {what}; leave it out or name another"
            )
        yield folder
        return
    if known := _known_base(writer, head):
        yield known
        return
    with scratch_folder(writer.store, scratch) as rebuilt:
        _bring(rebuilt, writer.store, head, anchor_source, writer.reader.threads)
        yield open_folder(rebuilt)


def _known_base(writer: Writer, head: Entry) -> Folder | None:
    """Return the folder that this host published last, if it still holds the head."""
    if writer.host.checkpoint is not None:
        # It may be gone or half overwritten by now: then it is no base, and that is no error.
        with contextlib.suppress(DeltaError):
            folder = open_folder(writer.host.checkpoint)
            if _holds(writer, folder, head):
                return folder
    return None


def _holds(writer: Writer, folder: Folder, head: Entry) -> bool:
    layout = folder.checkpoint.layout
    if layout.digest != head.manifest.layout:
        return False
    table = fingerprint_folder(folder, writer.reader.threads)
    return fp_hex(state_fingerprint(layout.weights, table)) == head.manifest.state


# ---------------------------------------------------------------- from a trainer's tensors


class Publisher:
    """Publishes a trainer's tensors, step by step. Not for use by several threads at once.

    serving: the checkpoint folder that samplers load; its layout, files and side files are followed, and tensors that
    do not fit it are refused by name. Without it the first publish decides. anchors: make one in the background
    when it is due. The base, a copy of all published tensors, is held beside them, or, with base_on="host", in
    pinned host memory, which costs an NVIDIA GPU no memory and every publish the time in which the host's bus reads it.

    backend: see `tensors.choose`; choice: which it became and why, from the first publish on.

    group: the ranks of a sharded trainer; then every call is made by all of them, see `publish`; each rank has the
    base of what it holds. frozen: with a group, what becomes of tensors of the serving checkpoint, or of the store,
    that no rank holds: "refuse" names one, "carry" leaves them as they are.

    On a store that has versions already, it claims the next epoch, so that an earlier publisher is fenced; the first
    publish finds out by fingerprint which version the trainer holds, or rebuilds the head from the store.
    """

    def __init__(
        self,
        url: str | Store,
        *,
        serving: str | None = None,
        run_id: str | None = None,
        resume: bool = False,
        new_lineage: bool = False,
        codec: str = "zstd",
        form: str = "sparse",
        anchors: bool = True,
        threads: int | None = None,
        group: Group | None = None,
        frozen: Literal["refuse", "carry"] = "refuse",
        backend: str = "auto",
        base_on: Literal["device", "host"] = "device",
    ) -> None:
        if base_on not in ("device", "host"):
            raise ConfigError(f"base_on {base_on!r}: expected device or host")
        self._base_in_host = base_on == "host"
        self._collective: Collective | None = None
        self._backend, self.choice = backend, cast("Choice | None", None)
        if group is not None:
            from deltackpt.collective import Collective

            self._collective = Collective(
                url, group, serving=serving, run_id=run_id, resume=resume, new_lineage=new_lineage,
                codec=codec, form=form, frozen=frozen, anchors=anchors, threads=threads, backend=backend,
                base_in_host=self._base_in_host,
            )  # fmt: skip
            return
        self._where, self._codec, self._form, self._anchors = url, codec, form, anchors
        self._serving = open_folder(serving) if serving is not None else None
        self._writer = Writer(open_store(url), run_id=run_id, resume=resume, new_lineage=new_lineage, threads=threads)
        self._threads = threads
        self._side_files = self._writer.side_files(self._serving) if self._serving else ()
        self._base: _Base | None = None
        self._roster: Roster | None = None
        self._open: _Open | None = None
        self._background: _Background | None = None
        self._flight: Pending | None = None
        if self._writer.head is not None and not new_lineage:
            self._writer.claim()

    def publish(
        self, params: Params | Pieces, *, step: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> Manifest:
        """Commit the tensors as the next version; returns after the commit.

        params: mapping or iterable of (name, torch tensor or numpy array), all on the CPU or all on one other device of
        torch; read only, not kept. Raises ConfigError naming a tensor that does not fit; then, as after every error,
        the base is what it was.

        With a group: what this rank holds, as DTensors, `Slice`s, or whole tensors under names that are split over the
        ranks in any way, those of a rank all on one device. A mapping or list is read where it lies; of another
        iterable, each tensor is copied as it comes, on its device, and may be freed. Returns, or raises, on all ranks
        alike.
        """
        return self.submit(params, step=step, metadata=metadata).result()

    def submit(
        self, params: Params | Pieces, *, step: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> Pending:
        """Begin to publish; returns once the tensors may change again. See `publish`.

        With backend cuda that is when the changes have been extracted, and the rest is done in a thread; with others
        it is after the commit. One version is in flight: the next call waits for it. Its error comes out of `result`,
        and out of the next call if nobody asked.
        """
        from deltackpt.tensors import collect

        if self._collective is not None:
            return Pending(partial(self._collective.publish, cast("Pieces", params), step=step, metadata=metadata))
        self._join()
        self._raise_background()
        self._settle()
        live = collect(cast("Params", params), self._base.layout if self._base is not None else None, self._roster)
        self._roster = live.roster
        writer = self._writer
        writer.require_step(step)
        device = self._device_of(live)
        held, where = device.hold(live.kept)
        if self._serving is not None:
            self._serving.checkpoint.layout.require_same(live.layout)
        if self._base is None and writer.head is not None and not writer.new_lineage:
            draft, base = self._adopt(live.layout, where, device)
            if draft is not None:
                return Pending(partial(self._commit, draft, partial(self._take, base), step, metadata))
            self._take(base)
        if self._base is None:
            return Pending(partial(self._first, live.layout, where, device, step, metadata))
        if live.layout is not self._base.layout:
            self._base.layout.require_same(live.layout)
        old = self._base.addresses
        encoding = device.encode(self._base.layout, old, where, codec=self._codec, form=self._form)
        work = partial(self._next, encoding, where, step, metadata)
        self._flight = Pending(work, detached=device.detached)
        del held  # what is not detached has been published
        return self._flight

    def _device_of(self, live: Live) -> Device:
        """Return the backend. It stays that of the first tensors: the base is in its memory."""
        from deltackpt.tensors import choose

        if self._base is None:
            self.choice = choose(live.on, self._backend)
            return self.choice.device(self._threads)
        assert self.choice is not None
        if self.choice.on != live.on:
            raise ConfigError(
                f"these tensors are on {live.on}, those before were on {self.choice.on}; make a new Publisher"
            )
        return self._base.device

    def _join(self) -> None:
        """Wait for the version in flight; raises its error unless that was seen."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            flight.join()

    def _first(
        self, layout: Layout, where: U64, device: Device, step: int | None, metadata: Mapping[str, str] | None
    ) -> Manifest:
        placement = self._serving.checkpoint.placement if self._serving else default_placement(layout)
        base = _Base.of(layout, placement, device, in_host=self._base_in_host)
        # The base is copied first and everything is written from it: what is published is what is kept.
        _copy(device, layout, where, base.addresses)
        with attempt(self._writer) as upload:
            host, held = base.in_host_memory()
            draft = full_draft(self._writer, upload, Weights(layout, placement, self._side_files, held))
            del host
            manifest = self._commit(draft, partial(self._take, base), step, metadata)
        self._start_anchor()
        return manifest

    def _next(self, encoding: Encoding, where: U64, step: int | None, metadata: Mapping[str, str] | None) -> Manifest:
        base = self._base
        assert base is not None
        with attempt(self._writer) as upload:
            source = Weights(base.layout, base.placement, self._side_files, where)
            draft = _delta(self._writer, upload, source, encoding.groups())
            manifest = self._commit(draft, partial(self._advance, encoding), step, metadata)
        self._start_anchor()
        return manifest

    def _commit(
        self, draft: Draft, advance: Callable[[], None], step: int | None, metadata: Mapping[str, str] | None
    ) -> Manifest:
        """Commit a draft, then bring the base to it. An open commit is closed by the next publish."""
        writer = self._writer
        self._open = _Open(writer.head.manifest.version + 1 if writer.head else 0, advance)
        manifest = writer.commit(draft, step=step, metadata=metadata)
        self._settle()
        return manifest

    def _settle(self) -> None:
        """Find out what became of an open commit, and advance the base if it was made, and only then."""
        if self._open is None:
            return
        try:
            self._writer.settle()
        finally:
            # Without an answer it stays open; a commit that was lost or never begun is over.
            begun, self._open = self._open, self._open if self._writer.unsettled else None
        if begun.version in self._writer.reader.history:
            begun.advance()
            self._writer.resume = self._writer.new_lineage = False

    def _advance(self, encoding: Encoding) -> None:
        """Bring the base to what was committed, by the delta itself."""
        base, self._base = self._base, None
        assert base is not None
        encoding.advance(base.addresses)
        # Interrupted, it is no version's: then there is none, and the next publish finds one in the store.
        self._base = base

    def _take(self, base: _Base) -> None:
        self._base = base

    def _adopt(self, given: Layout, where: U64, device: Device) -> tuple[Draft | None, _Base]:
        """Find a base in a store that has versions already.

        If what the trainer holds is a version, bit for bit, it is the base once the draft that goes on from that
        version is committed, and nothing is downloaded. Else there is no draft, and the base is the head, rebuilt
        from the store.
        """
        from deltackpt.tensors import restore_into

        head, reader = self._writer.head, self._writer.reader
        assert head is not None
        layout = reader.layout(head.manifest.layout)
        layout.require_same(given)
        placement = self._serving.checkpoint.placement if self._serving else reader.placement(head.manifest)
        base = _Base.of(layout, placement, device, in_host=self._base_in_host)
        table = device.fingerprints(layout, where)
        state = state_fingerprint(layout.weights, table)
        version = reader.identify(layout.digest, state)
        if version is not None and version != head.manifest.version and not reader.reachable(version):
            # Pruned: no follower could get there. A delta from the head can be followed.
            version = None
        if version is None:
            restore_into(reader, head.manifest.version, device, base.addresses)
        else:
            _copy(device, layout, where, base.addresses)
        self._side_files = self._side_files or head.manifest.side_files
        if version is None:
            return None, base
        kind: Literal["empty", "rewind"] = "empty" if version == head.manifest.version else "rewind"
        return Draft(kind, layout, placement, self._side_files, state, version), base

    def _start_anchor(self) -> None:
        """Begin to make an anchor of the version that was just committed if one is due."""
        if not self._anchors or self._background is not None:
            return
        assert self._writer.head is not None
        version = self._writer.head.manifest.version
        try:
            due = anchor_due(self._writer.reader)
        except DeltaError as exc:
            _log.warning("version %d is committed, but whether an anchor is due is not known: %s", version, exc)
            return
        if due:
            self._background = _Background(lambda: make_anchor(self._where, version, threads=1))

    def _raise_background(self) -> None:
        if self._background is not None and self._background.done():
            background, self._background = self._background, None
            background.result()

    def close(self) -> None:
        """Wait for the version in flight and an anchor that is being made; raises the error with which they ended."""
        if self._collective is not None:
            self._collective.close()
            return
        self._join()
        if self._background is not None:
            background, self._background = self._background, None
            background.result()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Background:
    """One piece of work in a thread of its own; its error comes out of `result`."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._error: BaseException | None = None

        def run() -> None:
            try:
                work()
            except BaseException as exc:  # handed to the thread that asks
                self._error = exc

        self._thread = threading.Thread(target=run, name="deltackpt")
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


class Pending:
    """A version that is being published."""

    def __init__(self, work: Callable[[], Manifest], *, detached: bool = False) -> None:
        self._manifest: Manifest | None = None
        self._seen = False

        def run() -> None:
            self._manifest = work()

        self._background = _Background(run) if detached else None
        if not detached:
            run()

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._background is None or self._background.done()

    def result(self) -> Manifest:
        """Return the manifest, after the commit; raises the error with which publishing ended."""
        self._seen = True
        if self._background is not None:
            self._background.result()
        assert self._manifest is not None
        return self._manifest

    def join(self) -> None:
        """Wait; raises the error unless `result` has raised it."""
        if not self._seen:
            self.result()
        elif self._background is not None:
            with contextlib.suppress(BaseException):
                self._background.result()


@dataclass(frozen=True)
class _Base:
    """A copy in memory of all tensors of the head, file after file as a folder holds them."""

    layout: Layout
    placement: Placement
    device: Device
    addresses: U64
    begin: int
    in_host: bool
    memory: object = field(repr=False)

    @classmethod
    def of(cls, layout: Layout, placement: Placement, device: Device, *, in_host: bool) -> _Base:
        """Return room for all tensors; its bytes are garbage."""
        memory, begin = device.allocate(layout.total_bytes, in_host=in_host)
        order = np.array([t for f in placement.files for t in f.tensors], np.int64)
        sizes = layout.nbytes[order] if len(order) else layout.nbytes
        held = np.zeros(len(layout.names), np.uint64)
        held[order] = (np.cumsum(sizes) - sizes).astype(np.uint64) + np.uint64(begin)
        return cls(layout, placement, device, held, begin, in_host or isinstance(device, backend.Cpu), memory)

    def in_host_memory(self) -> tuple[object, U64]:
        """Return memory of the host that holds the tensors, and their addresses in it."""
        if self.in_host:
            return self.memory, self.addresses
        host = np.empty(max(1, self.layout.total_bytes), np.uint8)
        begin = int(host.__array_interface__["data"][0])
        self.device.copy(begin, self.begin, self.layout.total_bytes)
        return host, self.addresses - np.uint64(self.begin) + np.uint64(begin)


@dataclass(frozen=True)
class _Open:
    """A commit whose outcome is not known yet, and how the base is brought to it."""

    version: int
    advance: Callable[[], None]


def _copy(device: Device, layout: Layout, source: U64, target: U64) -> None:
    """Copy every tensor from one place in memory to another."""
    for t, nbytes in enumerate(layout.nbytes.tolist()):
        if nbytes:
            device.copy(int(target[t]), int(source[t]), nbytes)
