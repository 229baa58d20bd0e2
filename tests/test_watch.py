"""The sidecar: what it polls, applies, tells and leaves behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import make_cases
import pytest
from faults import FaultStore
from helpers import REPOSITORY, Expect, cli_good, cli_run, command, exact, recorded
from watching import Script, Told, flip_data, follow, start, without_data

from deltackpt import folder as folder_module
from deltackpt.errors import Busy, ChainError, ConfigError, IntegrityError, NotFound, Poisoned, StoreError, Unavailable
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower
from deltackpt.lease import lease_id, leases, set_channel
from deltackpt.ledger import ApplyLog, Heartbeat
from deltackpt.publish import publish_folder
from deltackpt.reader import Reader
from deltackpt.store import LocalStore, Store, open_store
from deltackpt.watch import Backoff, Pace, Watcher, fifo


class Run:
    """v0 to v5, a store that holds those up to `published`, and what must come out."""

    def __init__(self, root: Path, published: int) -> None:
        self.root, self.store, self.dest = root, root / "store", root / "dest"
        self.expect: Expect = make_cases.chain(root, 5)
        self.told = Told()
        for version in range(published + 1):
            self.publish(version)()

    def publish(self, version: int) -> Callable[[], object]:
        """Return what publishes a version."""
        return lambda: publish_folder(
            self.root / f"v{version}", self.store, step=10 * version, run_id="r", anchors=False
        )

    def exact(self, version: int) -> Callable[[], None]:
        """Return what asserts that the folder holds a version, byte for byte."""
        return lambda: exact(self.dest, self.expect, version)

    def log(self) -> list[dict[str, object]]:
        """The lines of the apply log."""
        return [json.loads(line) for line in (self.dest / ".deltackpt" / "apply.log").read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, 1)


def nothing() -> None:
    pass


# ---------------------------------------------------------------- polls


def test_new_version_is_applied_by_the_next_poll(run: Run) -> None:
    _, pace = follow(run.store, run.dest, run.publish(2), run.exact(2), run.publish(3), run.exact(3), told=run.told)
    assert run.told.names() == ["opened", "applied", "applied", "applied"]
    assert [event.fields["version"] for event in run.told[1:]] == [1, 2, 3]
    # After news it looks again at once.
    assert pace.slept == [0.0, 1.25, 0.0, 1.25, 1.25, 0.0, 1.25, 1.25]


def test_many_versions_are_caught_up_with_by_one_apply(run: Run) -> None:
    def publish() -> None:
        for version in (2, 3, 4, 5):
            run.publish(version)()

    watcher, _ = follow(run.store, run.dest, publish, run.exact(5))
    assert watcher.state.applies == 2
    assert [(line["version"], line["previous"], line["deltas"]) for line in run.log()] == [(1, None, 1), (5, 1, 4)]


def test_idle_poll_is_one_request_and_no_listing(run: Run) -> None:
    seen: list[FaultStore] = []

    def wrap(store: Store) -> Store:
        seen.append(FaultStore(store))
        return seen[0]

    def forget() -> None:
        seen[0].operations.clear()

    def look() -> None:
        assert seen[0].operations == ["get manifests/00000000000000000002.json"]
        forget()

    follow(run.store, run.dest, forget, look, look, look, wrap=wrap)
    assert len(seen) == 1


def test_idle_poll_of_a_channel_is_one_request_and_no_listing(run: Run) -> None:
    seen: list[FaultStore] = []

    def wrap(store: Store) -> Store:
        seen.append(FaultStore(store))
        return seen[0]

    def look() -> None:
        assert seen[0].operations == ["get channels/eval/00000000000000000001.json"]
        seen[0].operations.clear()

    set_channel(open_store(run.store), "eval", 1)
    follow(run.store, run.dest, lambda: seen[0].operations.clear(), look, look, wrap=wrap, channel="eval")


def test_restart_reads_the_manifests_from_its_own_version_on(run: Run) -> None:
    follow(run.store, run.dest)
    for version in (2, 3):
        run.publish(version)()
    seen: list[FaultStore] = []

    def wrap(store: Store) -> Store:
        seen.append(FaultStore(store))
        return seen[0]

    follow(run.store, run.dest, run.exact(3), wrap=wrap)
    assert "keys manifests/" not in seen[0].operations
    assert "get manifests/00000000000000000000.json" not in seen[0].operations


def test_pauses_are_spread_by_a_quarter_of_the_poll_interval(run: Run) -> None:
    class Low(Script):
        def uniform(self, low: float, high: float) -> float:
            return low

    pace = Low()
    watcher = Watcher(str(run.store), str(run.dest), poll_s=4.0, pace=pace)
    watcher.step()
    assert watcher.step() == 3.0
    watcher.close()
    watcher, pace = start(run.store, run.dest, poll_s=4.0)
    assert watcher.step() == 5.0
    watcher.close()


def test_backoff_grows_from_a_fifth_of_a_second_to_thirty_seconds(run: Run) -> None:
    pace = Script()
    backoff = Backoff(pace)
    assert [backoff.next() for _ in range(10)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    backoff.reset()
    assert backoff.next() == 0.2


def test_store_that_does_not_answer_is_waited_for(run: Run) -> None:
    class Down(FaultStore):
        down = False

        def get(self, key: str, out: memoryview) -> int:
            if self.down:
                raise Unavailable("no answer; try again")
            return self.store.get(key, out)

    downs: list[Down] = []

    def wrap(store: Store) -> Store:
        downs.append(Down(store))
        return downs[0]

    def down() -> None:
        downs[0].down = True

    def up() -> None:
        downs[0].down = False

    acts = [down, nothing, nothing, lambda: (up(), run.publish(2)())]
    watcher, pace = follow(run.store, run.dest, *acts, run.exact(2), wrap=wrap, told=run.told)
    assert run.told.lines("error") == ["no answer; try again"] * 3
    assert pace.slept == [0.0, 1.25, 0.2, 0.4, 0.8, 0.0, 1.25, 1.25]
    assert (watcher.state.failures, watcher.state.last_error) == (3, None)


def test_store_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    run = Run(tmp_path, -1)
    follow(run.store, run.dest, run.publish(0), run.exact(0), told=run.told)
    (line,) = run.told.lines("error")
    assert line.startswith(f"{run.store}")


def test_store_that_ends_before_the_local_version_never_takes_a_follower_back(run: Run) -> None:
    follow(run.store, run.dest)
    newest = run.store / "manifests" / f"{1:020d}.json"
    away = run.root / "away"
    newest.rename(away)
    acts = [lambda: away.rename(newest), nothing]
    watcher, _ = follow(run.store, run.dest, *acts, run.exact(1), told=run.told)
    (line,) = run.told.lines("error")
    assert "ends at version 0" in line
    assert "holds version 1" in line
    assert watcher.state.applies == 0


def test_wake_ends_a_sleep_from_another_thread_or_a_handler() -> None:
    pace = Pace()
    pace.ring()
    assert pace.wait(1e6) is True
    assert pace.wait(0.0) is False
    for _ in range(100_000):
        pace.ring()
    assert pace.wait(1e6) is True
    assert pace.wait(0.0) is False
    pace.close()


def test_fifo_is_made_and_what_is_written_to_it_ends_a_sleep(tmp_path: Path) -> None:
    pace = Pace()
    with fifo(str(tmp_path / "wake"), pace):
        for _ in range(2):
            (tmp_path / "wake").write_text("x\n")
            assert pace.wait(1e6) is True
        assert pace.wait(0.0) is False
    pace.close()


def test_fifo_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wake").write_text("")
    pace = Pace()
    with pytest.raises(ConfigError, match="is no FIFO; name another path"), fifo(str(tmp_path / "wake"), pace):
        pass
    pace.close()


# ---------------------------------------------------------------- channels and orders


def test_channel_is_followed_forwards_and_backwards(run: Run) -> None:
    for version in (2, 3):
        run.publish(version)()
    store = open_store(run.store)
    set_channel(store, "eval", 1)
    acts = [run.exact(1), lambda: set_channel(store, "eval", 3), run.exact(3), lambda: set_channel(store, "eval", 0)]
    follow(run.store, run.dest, *acts, run.exact(0), channel="eval")
    assert [(line["version"], line["previous"]) for line in run.log()] == [(1, None), (3, 1), (0, 3)]


def test_channel_ahead_of_the_store_is_waited_for_and_said_once(run: Run) -> None:
    run.publish(2)()
    store = open_store(run.store)
    set_channel(store, "eval", 2)
    newest = run.store / "manifests" / f"{2:020d}.json"
    away = run.root / "away"
    newest.rename(away)
    acts = [nothing, nothing, lambda: away.rename(newest)]
    follow(run.store, run.dest, *acts, run.exact(2), channel="eval", told=run.told)
    assert run.told.lines("warning") == [f"channel eval names version 2, {run.store} ends at version 1; waiting for it"]
    assert run.told.lines("error") == []


def test_channel_that_is_not_set_yet_is_waited_for_and_said_once(run: Run) -> None:
    store = open_store(run.store)
    acts = [nothing, nothing, lambda: set_channel(store, "eval", 0)]
    follow(run.store, run.dest, *acts, run.exact(0), channel="eval", told=run.told)
    assert run.told.lines("warning") == [
        f"channel eval of {run.store} names no version yet; deltackpt channel set does"
    ]


def test_ordered_version_is_held_until_the_order_ends(run: Run) -> None:
    watcher, _ = start(
        run.store, run.dest,
        lambda: watcher.order(0), run.exact(0),
        run.publish(2), run.exact(0),
        lambda: watcher.order(None), run.exact(2),
    )  # fmt: skip
    watcher.run()
    assert (watcher.state.applied, watcher.state.ordered, watcher.state.head) == (2, None, 2)


def test_ordered_version_that_is_not_there_is_waited_for(run: Run) -> None:
    watcher, _ = start(run.store, run.dest, lambda: watcher.order(2), run.publish(2), run.exact(2), told=run.told)
    watcher.run()
    assert run.told.lines("warning") == [f"version 2 was ordered, {run.store} ends at version 1; waiting for it"]


def test_held_follower_stages_ahead_and_applies_what_is_ordered(run: Run) -> None:
    def staged(version: int) -> Callable[[], None]:
        def look() -> None:
            assert watcher.state.staged == version
            assert len(list((run.dest / ".deltackpt").glob("stage-*"))) == 1

        return look

    watcher, _ = start(
        run.store, run.dest,
        staged(1), lambda: watcher.order(1), run.exact(1),
        run.publish(2), staged(2), run.exact(1),
        run.publish(3), staged(3), lambda: watcher.order(3), run.exact(3),
        lambda: watcher.order(0), run.exact(0), staged(3),
        hold=True, told=run.told,
    )  # fmt: skip
    watcher.run()
    assert [e.fields["version"] for e in run.told if e.name == "staged"] == [1, 2, 3, 3]
    assert [e.fields["version"] for e in run.told if e.name == "applied"] == [1, 3, 0]
    assert list((run.dest / ".deltackpt").glob("stage-*")) == []


# ---------------------------------------------------------------- faults


def test_version_that_cannot_be_had_is_given_up_and_passed_over(run: Run) -> None:
    follow(run.store, run.dest)
    run.publish(2)()
    flip_data(run.store, 2)
    lines: list[str] = []

    def until_given_up() -> bool:
        return any("given up after" in line for line in run.told.lines("error"))

    def repair() -> None:
        lines.extend(run.told.lines("error"))
        flip_data(run.store, 2)
        run.publish(3)()

    watcher, _ = follow(run.store, run.dest, until_given_up, repair, run.exact(3), told=run.told, give_up_s=20.0)
    assert all(line.startswith("version 2 cannot be had: version 2: shard ") for line in lines)
    assert [line.endswith("looking for a newer one") for line in lines] == [False] * (len(lines) - 1) + [True]
    assert 4 <= len(lines) <= 10
    assert run.told.lines("error") == lines
    assert watcher.state.last_error is None


def test_version_given_up_is_taken_when_it_is_repaired(run: Run) -> None:
    follow(run.store, run.dest)
    run.publish(2)()
    back = without_data(run.store, 2)
    acts = [lambda: "given-up" in run.told.names(), back, *[nothing] * 30]
    watcher, _ = follow(run.store, run.dest, *acts, run.exact(2), told=run.told, give_up_s=5.0)
    assert watcher.state.last_error is None


def test_wake_tries_a_version_that_was_left_alone_at_once(run: Run) -> None:
    follow(run.store, run.dest)
    run.publish(2)()
    back = without_data(run.store, 2)
    acts = [lambda: "given-up" in run.told.names(), lambda: (back(), watcher.wake()), run.exact(2)]
    watcher, _ = start(run.store, run.dest, *acts, told=run.told, give_up_s=5.0)
    watcher.run()


def test_wrong_base_ends_the_watcher_with_its_error(run: Run) -> None:
    cli_good("pull", run.store, run.dest, "--version", "0")
    shard = min(run.dest.glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(ChainError, match="differs from version 0"):
        follow(run.store, run.dest)
    watcher, _ = follow(run.store, run.dest, run.exact(1), reseed=True)
    assert watcher.mode == "replace"


def test_apply_that_fails_is_tried_again_from_what_the_folder_holds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(run.store, run.dest)
    run.publish(2)()
    real, failures = os.rename, iter([OSError(28, "No space left on device")])

    def rename(source: str, target: str) -> None:
        if os.path.basename(target) == "v2" and (failure := next(failures, None)):
            raise failure
        real(source, target)

    monkeypatch.setattr(folder_module.os, "rename", rename)
    follow(run.store, run.dest, run.exact(1), run.exact(2), told=run.told)
    (line,) = run.told.lines("error")
    assert "no space" in line
    assert run.told.names().count("opened") == 2


def test_poisoned_folder_ends_the_watcher(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(self: object) -> None:
        raise Poisoned("torn")

    monkeypatch.setattr(folder_module.StagedFolder, "apply", poisoned)
    with pytest.raises(Poisoned, match="torn"):
        follow(run.store, run.dest)


def test_folder_held_by_another_process_is_waited_for(run: Run) -> None:
    holder = CheckpointTarget(run.dest)
    reader = Reader(open_store(run.store))
    reader.load()
    holder.open(reader)
    follow(run.store, run.dest, nothing, holder.close, run.exact(1), told=run.told)
    assert run.told.lines("error") == [f"{run.dest} is held by another process; wait for it to end"] * 2


# ---------------------------------------------------------------- hook


def hook(run: Run, exit_code: str = "0") -> str:
    return f'echo "$DELTACKPT_PREVIOUS-$DELTACKPT_VERSION $DELTACKPT_DEST" >>{run.root}/hooks; exit {exit_code}'


def hooks(run: Run) -> list[str]:
    return (run.root / "hooks").read_text().splitlines()


def test_hook_is_told_version_previous_one_and_folder(run: Run) -> None:
    follow(run.store, run.dest, run.publish(2), nothing, command=hook(run))
    assert hooks(run) == [f"-1 {run.dest}", f"1-2 {run.dest}"]
    assert not (run.dest / ".deltackpt" / "hook.json").exists()


def test_hook_that_fails_runs_again_with_each_poll_and_the_version_stays(run: Run) -> None:
    command = hook(run, f"$(test -e {run.root}/good; echo $?)")
    acts = [run.exact(1), nothing, lambda: (run.root / "good").touch(), nothing]
    watcher, pace = follow(run.store, run.dest, *acts, command=command, told=run.told)
    assert hooks(run) == [f"-1 {run.dest}"] * 4
    assert (
        run.told.lines("error")
        == ["the hook (--exec) for version 1 exited with 1, 0 was expected; it runs again with the next poll"] * 3
    )
    assert pace.slept == [1.25] * 5
    assert (watcher.state.hook_failures, watcher.state.hook_owed, watcher.state.last_error) == (3, None, None)


def test_hook_that_is_owed_runs_after_a_restart(run: Run) -> None:
    follow(run.store, run.dest, command=hook(run))
    run.publish(2)()
    follow(run.store, run.dest, command=hook(run, "7"))
    # It still knows version 1, whatever came between.
    run.publish(3)()
    follow(run.store, run.dest, command=hook(run))
    assert hooks(run) == [f"-1 {run.dest}", f"1-2 {run.dest}", f"1-3 {run.dest}"]
    follow(run.store, run.dest, command=hook(run))
    assert len(hooks(run)) == 3


def test_hook_is_not_run_for_an_apply_that_did_not_happen(run: Run) -> None:
    follow(run.store, run.dest, command=hook(run))
    (run.dest / ".deltackpt" / "hook.json").write_text('{"version": 2, "previous": 1}\n')
    follow(run.store, run.dest, command=hook(run))
    assert hooks(run) == [f"-1 {run.dest}"]


def test_hook_that_cannot_be_found_is_an_error_of_the_shell(run: Run) -> None:
    with pytest.raises(Exception, match="exited with 127, 0 was expected"):
        Watcher(str(run.store), str(run.dest), command="/nowhere/hook 2>/dev/null").once()


# ---------------------------------------------------------------- once


def test_once_brings_the_folder_up_to_date_and_ends(run: Run) -> None:
    answer = cli_good_once(run)
    assert (answer["applied"], answer["applies"], answer["mode"]) == (1, 1, "switch")
    run.exact(1)()
    assert cli_good_once(run)["applies"] == 0
    assert cli_run("watch", run.store, run.dest, "--once").stdout == f"{run.dest}: at version 1 already\n"


def cli_good_once(run: Run) -> dict[str, object]:
    result = cli_run("watch", run.store, run.dest, "--once", "--json")
    assert result.exit_code == 0
    answer: dict[str, object] = json.loads(result.stdout)
    return answer


def test_once_waits_for_what_may_pass_until_the_give_up_time(run: Run) -> None:
    back = without_data(run.store, 1)
    watcher, pace = start(run.store, run.dest, nothing, nothing, back, told=run.told)
    assert watcher.once().applied == 1
    assert pace.slept == [0.2, 0.4, 0.8]
    assert len(run.told.lines("warning")) == 3


def test_once_raises_the_error_when_the_give_up_time_is_over(run: Run) -> None:
    flip_data(run.store, 1)
    watcher, pace = start(run.store, run.dest, *[nothing] * 100, give_up_s=10.0)
    with pytest.raises(IntegrityError, match="version 1"):
        watcher.once()
    assert sum(pace.slept) >= 10.0
    assert not (run.dest / "current").exists()


def test_once_without_a_version_or_a_store_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        Watcher(str(tmp_path / "store"), str(tmp_path / "dest")).once()
    run = Run(tmp_path, 0)
    with pytest.raises(NotFound, match=r"^channel eval of .* names no version yet"):
        Watcher(str(run.store), str(run.dest), channel="eval").once()


def test_once_exits_with_the_code_of_a_hook_that_failed_and_owes_it(run: Run) -> None:
    result = cli_run("watch", run.store, run.dest, "--once", "--exec", "exit 3")
    assert result.exit_code == 1
    assert "deltackpt: the hook (--exec) for version 1 exited with 3" in result.stderr
    assert cli_run("watch", run.store, run.dest, "--once", "--exec", hook(run)).exit_code == 0
    assert hooks(run) == [f"-1 {run.dest}"]


# ---------------------------------------------------------------- modes


@pytest.mark.parametrize("mode", ["replace", "switch", "in-place"])
def test_folder_is_kept_in_the_mode_that_it_was_made_with(run: Run, mode: str) -> None:
    follow(run.store, run.dest, mode=mode)
    run.publish(2)()
    watcher, _ = follow(run.store, run.dest, run.exact(2), mode=mode)
    assert watcher.mode == mode
    assert (run.dest / "current").is_symlink() == (mode == "switch")
    again, _ = follow(run.store, run.dest)
    assert (again.mode == "switch") == (mode == "switch")


def test_new_folder_is_kept_by_switching(run: Run) -> None:
    run.dest.mkdir()
    follow(run.store, run.dest)
    assert os.readlink(run.dest / "current") == "v1"


def test_first_switch_that_was_cut_short_is_still_one(run: Run) -> None:
    (run.dest / "v0").mkdir(parents=True)
    watcher, _ = follow(run.store, run.dest, run.exact(1))
    assert watcher.mode == "switch"


# ---------------------------------------------------------------- what it leaves behind


def test_apply_log_has_one_line_an_apply(run: Run) -> None:
    follow(run.store, run.dest, run.publish(2))
    first, second = run.log()
    reader = Reader(open_store(run.store))
    reader.load()
    entry = reader.history[2]
    assert {k: v for k, v in second.items() if k not in ("time", "stage_ms", "apply_ms")} == {
        "way": "deltas", "version": 2, "lineage": entry.manifest.lineage, "digest12": entry.digest[:12],
        "weight_version": f"{entry.manifest.lineage}.2.{entry.digest[:12]}", "step": 20, "previous": 1,
        "anchor": None, "deltas": 1, "bytes_fetched": entry.manifest.totals.stored,
    }  # fmt: skip
    assert (first["way"], first["previous"], first["anchor"]) == ("anchor+deltas", None, 0)


def test_version_that_somebody_else_brought_is_logged_as_found_once(run: Run) -> None:
    with Follower(str(run.store), CheckpointTarget(run.dest, mode="switch")) as follower:
        prepared = follower.prepare()
        assert prepared is not None
        prepared.apply()
    follow(run.store, run.dest)
    follow(run.store, run.dest)
    cli_good("pull", run.store, run.dest)
    assert [(line["way"], line["version"]) for line in run.log()] == [("found", 1)]


def test_pull_writes_the_lines_that_a_watcher_writes(run: Run) -> None:
    cli_good("pull", run.store, run.dest, "--mode", "switch")
    run.publish(2)()
    cli_good("pull", run.store, run.dest)
    cli_good("pull", run.store, run.dest)
    cli_good("pull", run.store, run.dest, "--version", "1")
    follow(run.store, run.dest)
    lines = run.log()
    assert [(line["way"], line["previous"], line["version"]) for line in lines] == [
        ("anchor+deltas", None, 1), ("deltas", 1, 2), ("undo", 2, 1), ("deltas", 1, 2)
    ]  # fmt: skip
    assert len({frozenset(line) for line in lines}) == 1


def test_apply_log_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "own" / "apply.log"
    log = ApplyLog(str(path))
    assert log.last() is None
    log.add({"version": 1, "weight_version": "l.1.d"})
    with path.open("a") as file:
        file.write('{"version": 2, "wei')
    assert log.last() == "l.1.d"
    log.add({"version": 3, "weight_version": "l.3.d"})
    assert path.read_text().splitlines()[1:] == ['{"version": 2, "wei', '{"version": 3, "weight_version": "l.3.d"}']
    assert log.last() == "l.3.d"


def test_line_that_could_not_be_logged_is_written_first_next_time(tmp_path: Path) -> None:
    path = tmp_path / "own" / "apply.log"
    (tmp_path / "own").write_text("in the way")
    log = ApplyLog(str(path))
    with pytest.raises(StoreError, match=r"apply\.log"):
        log.add({"version": 1})
    (tmp_path / "own").unlink()
    log.add({"version": 2})
    assert path.read_text() == '{"version": 1}\n{"version": 2}\n'


def test_heartbeat_is_written_with_every_poll(run: Run) -> None:
    path = run.root / "heart"
    times: list[float] = []

    def look() -> None:
        beat = json.loads(path.read_text())
        assert (beat["applied"], beat["goal"], beat["head"], beat["error"]) == (1, 1, 1, None)
        times.append(beat["time"])

    follow(run.store, run.dest, look, look, heartbeat=str(path))
    assert times == [1000.0, 1001.25]
    assert [p.name for p in run.root.glob("heart*")] == ["heart"]


def test_heartbeat_that_cannot_be_written_is_said(run: Run) -> None:
    follow(run.store, run.dest, told=run.told, heartbeat=str(run.root / "no" / "heart"))
    assert run.told.lines("error") == [f"no heartbeat: writing {run.root}/no/heart: No such file or directory"] * len(
        run.told.lines("error")
    )
    assert run.told.lines("error")


def test_bytes_that_come_while_staging_are_signs_of_life(run: Run) -> None:
    beats: list[dict[str, object]] = []

    class Slow(FaultStore):
        def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
            pace.seconds += 400.0
            self.store.read_into(key, out, offset=offset)

    class Heart(Heartbeat):
        def beat(self, fields: object) -> None:
            beats.append(dict(fields))  # type: ignore[call-overload]

    watcher, pace = start(run.store, run.dest, wrap=Slow, lease_store=open_store(run.store), threads=1)
    watcher._heart = Heart(str(run.root / "heart"))
    watcher.step()
    assert len(beats) >= 5
    assert {beat["applied"] for beat in beats[:-1]} == {None}
    (lease,) = leases(open_store(run.store))
    assert lease.created == pace.seconds
    watcher.close()


def test_lease_says_what_is_in_use(run: Run) -> None:
    store = open_store(run.store)
    seen: list[int | None] = []

    def look() -> None:
        (lease,) = leases(store)
        seen.append(lease.version)

    follow(run.store, run.dest, look, run.publish(2), look, lease_store=store)
    assert seen == [1, 2]
    (lease,) = leases(store)
    assert (lease.id, lease.mode, lease.dest, lease.channel) == (lease_id(str(run.dest)), "switch", str(run.dest), None)
    assert lease.store_id == Reader(store).info.store_id


def test_first_stage_is_leased_before_it_fetches(run: Run) -> None:
    store, seen = open_store(run.store), list[tuple[int | None, int | None]]()

    class Look(FaultStore):
        def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
            if key.startswith("data/"):
                (lease,) = leases(store)
                seen.append((lease.version, lease.staged))
            self.store.read_into(key, out, offset=offset)

    follow(run.store, run.dest, wrap=Look, lease_store=store)
    assert set(seen) == {(None, 1)}


def test_leases_may_lie_in_another_store(run: Run) -> None:
    result = cli_run("watch", run.store, run.dest, "--once", "--lease-url", run.root / "leases", "--lease-id", "me")
    assert result.exit_code == 0
    assert [one.id for one in leases(LocalStore(run.root / "leases"))] == ["me"]
    assert not (run.store / "followers").exists()


def test_follower_without_a_lease_writes_nothing_to_the_store(run: Run) -> None:
    before = make_cases.tree_digest(run.store)
    assert cli_run("watch", run.store, run.dest, "--once", "--no-lease").exit_code == 0
    assert make_cases.tree_digest(run.store) == before


def test_store_that_takes_no_lease_is_said_once_and_followed(run: Run) -> None:
    class ReadOnly(FaultStore):
        def put(self, key: str, parts: object, *, if_absent: bool = True) -> None:
            raise StoreError(f"writing {key}: no permission")

    acts = [run.publish(2), run.exact(2), nothing, nothing]
    follow(run.store, run.dest, *acts, told=run.told, lease_store=ReadOnly(open_store(run.store)))
    (line,) = run.told.lines("warning")
    assert line.startswith(f"no lease in {run.store}: writing followers/")
    assert run.told.lines("error") == []


# ---------------------------------------------------------------- stopping


def test_stop_while_staging_drops_the_stage(run: Run) -> None:
    class Stop(FaultStore):
        def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
            if key.startswith("data/"):
                watcher.terminate()
            self.store.read_into(key, out, offset=offset)

    watcher, _ = start(run.store, run.dest, wrap=Stop, told=run.told)
    watcher.run()
    assert run.told.names() == ["opened", "stopped"]
    assert list(run.root.glob("dest/**/*.safetensors")) == []
    follow(run.store, run.dest, run.exact(1))


def test_stop_while_applying_finishes_the_apply(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = folder_module.StagedFolder._switch

    def switch(self: folder_module.StagedFolder) -> None:
        watcher.terminate()
        real(self)

    monkeypatch.setattr(folder_module.StagedFolder, "_switch", switch)
    watcher, _ = start(run.store, run.dest, told=run.told, command=hook(run))
    watcher.run()
    run.exact(1)()
    assert run.told.names() == ["opened", "applied"]
    # The hook is for the next start.
    monkeypatch.undo()
    assert not (run.root / "hooks").exists()
    follow(run.store, run.dest, command=hook(run))
    assert hooks(run) == [f"-1 {run.dest}"]


class Sidecar:
    """A watcher in a process of its own."""

    def __init__(self, run: Run, *options: str) -> None:
        self.events: list[dict[str, object]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deltackpt", "watch", run.store, run.dest, "--log", "json", "--json", *options],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def until(self, name: str) -> dict[str, object]:
        """Read the log up to an event, which must come."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == name:
                return self.events[-1]
        raise AssertionError(f"no {name} in {self.events}")

    def end(self, number: int) -> tuple[int, dict[str, object]]:
        """Send a signal; returns the exit code and the answer."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        assert err == ""
        return self.process.returncode, json.loads(out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_an_idle_watcher_with_exit_code_0(run: Run, number: int) -> None:
    sidecar = Sidecar(run, "--poll", "1000")
    sidecar.until("applied")
    code, answer = sidecar.end(number)
    assert (code, answer["applied"], answer["applies"]) == (0, 1, 1)


CUT_OFF = """
import sys, time
from deltackpt import backend, cli_fleet
from deltackpt.cli import cli

def long(*_, **__):
    print("decoding", file=sys.stderr, flush=True)
    time.sleep(1000)

backend.fingerprints, cli_fleet._GRACE_S = long, 0.1
cli(sys.argv[1:])
"""


def test_signal_cuts_off_what_takes_long_to_decode(run: Run) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CUT_OFF, "watch", run.store, run.dest, "--json"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    while process.stderr.readline() != "decoding\n":
        pass
    assert len(list((run.dest / ".deltackpt").glob("stage-*"))) == 1
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err == "deltackpt: stopped; what was being staged is dropped, the next start stages it again\n"
    assert json.loads(out)["applied"] is None
    assert list((run.dest / ".deltackpt").glob("stage-*")) == []
    follow(run.store, run.dest, run.exact(1))


def test_hangup_and_a_line_in_the_fifo_poll_at_once(run: Run) -> None:
    fifo_path = run.root / "wake"
    sidecar = Sidecar(run, "--poll", "1000", "--wake", str(fifo_path))
    sidecar.until("applied")
    run.publish(2)()
    sidecar.process.send_signal(signal.SIGHUP)
    assert sidecar.until("applied")["version"] == 2
    run.publish(3)()
    fifo_path.write_text("news\n")
    assert sidecar.until("applied")["version"] == 3
    assert sidecar.end(signal.SIGTERM)[0] == 0


def test_signal_asks_a_running_hook_to_end(run: Run) -> None:
    sidecar = Sidecar(run, "--exec", f"touch {run.root}/began; sleep 1000")
    sidecar.until("applied")
    deadline = time.monotonic() + 60
    while not (run.root / "began").exists():
        assert time.monotonic() < deadline
        os.sched_yield()
    sidecar.process.send_signal(signal.SIGTERM)
    assert "was ended by signal 15" in str(sidecar.until("failed")["message"])
    assert sidecar.process.wait(60) == 0
    for pipe in (sidecar.process.stdout, sidecar.process.stderr):
        assert pipe is not None
        pipe.close()
    assert json.loads((run.dest / ".deltackpt" / "hook.json").read_text()) == {"version": 1, "previous": None}


def test_error_that_ends_a_watcher_is_a_line_of_the_json_log_and_the_answer(run: Run) -> None:
    (run.dest / "other").mkdir(parents=True)
    (run.dest / "store.json").write_text("{}")
    done = command("watch", run.store, run.dest, "--log", "json", "--json", "--once")
    assert done.returncode == 3
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert (lines[-1]["event"], lines[-1]["error"], lines[-1]["exit_code"]) == ("ended", "ConfigError", 3)
    assert json.loads(done.stdout) == {"error": "ConfigError", "message": lines[-1]["message"], "exit_code": 3}


def test_messages_of_the_package_are_lines_of_the_json_log(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = folder_module.StagedFolder.apply

    def apply(self: folder_module.StagedFolder) -> None:
        logging.getLogger("deltackpt").info("compiling")
        real(self)

    monkeypatch.setattr(folder_module.StagedFolder, "apply", apply)
    result = cli_run("watch", run.store, run.dest, "--once", "--log", "json")
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    # One more where kernels are compiled for the first time.
    told = [(line["event"], line["message"] if line["event"] == "message" else None) for line in lines]
    assert [one for one in told if not str(one[1]).startswith("compiling kernels")] == [
        ("opened", None), ("message", "compiling"), ("applied", None)
    ]  # fmt: skip
    assert "deltackpt: compiling\n" in cli_run("watch", run.store, run.root / "two", "--once").stderr


def test_descriptors_stay_as_they_are_over_many_versions(tmp_path: Path) -> None:
    run = Run(tmp_path, 0)
    counts: list[int] = []

    def publish(number: int) -> Callable[[], object]:
        def act() -> None:
            counts.append(len(os.listdir("/proc/self/fd")))
            publish_folder(run.root / f"v{number % 2}", run.store, step=10 * number, run_id="r", anchors=False)

        return act

    watcher, _ = follow(run.store, run.dest, *[publish(number) for number in range(1, 21)])
    assert watcher.state.applied == 20
    assert len(set(counts)) == 1


# ---------------------------------------------------------------- command line


def test_channel_commands_set_compare_and_show(run: Run) -> None:
    assert cli_run("channel", "set", run.store, "eval", "1").stdout == f"{run.store}: channel eval names version 1\n"
    assert cli_run("channel", "get", run.store, "eval").stdout == "1\n"
    answer = cli_good("channel", "set", run.store, "eval", "0", "--expect", "1", "--note", "back")
    assert {k: answer[k] for k in ("channel", "version", "number", "note")} == {
        "channel": "eval", "version": 0, "number": 1, "note": "back"
    }  # fmt: skip
    assert cli_good("channel", "get", run.store, "eval") == answer
    for arguments, code in (
        (["set", run.store, "eval", "1", "--expect", "1"], 12),
        (["set", run.store, "eval", "1", "--expect", "none"], 12),
        (["set", run.store, "eval", "9"], 3),
        (["set", run.store, "a/b", "0"], 3),
        (["set", run.store, "eval", "1", "--expect", "one"], 2),
        (["get", run.store, "other"], 11),
        (["get", run.root / "nowhere", "eval"], 10),
    ):
        result = cli_run("channel", *arguments)
        assert (result.exit_code, result.stdout) == (code, ""), arguments
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("deltackpt: ")


def test_status_shows_head_channels_and_followers(run: Run) -> None:
    text = cli_run("status", run.store).stdout
    assert text.splitlines()[0].startswith(f"{run.store}: version 1 (delta, step 10, ")
    assert text.splitlines()[1:] == ["no channels", "no followers"]
    set_channel(open_store(run.store), "eval", 0, note="base line")
    follow(run.store, run.dest, channel="eval", lease_store=open_store(run.store), lease_name="me")
    answer = cli_good("status", run.store)
    assert (answer["head"]["version"], answer["channels"][0]["version"]) == (1, 0)
    (lease,) = answer["followers"]
    assert (lease["id"], lease["version"], lease["channel"], lease["live"]) == ("me", 0, "eval", False)
    lines = cli_run("status", run.store).stdout.splitlines()
    assert lines[2].split() == ["CHANNEL", "NOTE", "VERSION", "SET"]
    assert lines[3].split()[:4] == ["eval", "base", "line", "0"]
    assert lines[5].split() == ["FOLLOWER", "CHANNEL", "VERSION", "BEHIND", "STAGED", "MODE", "SEEN", "LEASE"]
    assert lines[6].split()[:6] == ["me", "eval", "0", "1", "-", "switch"]
    assert lines[6].endswith("expired")


def test_status_of_no_store_is_an_error(tmp_path: Path) -> None:
    assert cli_run("status", tmp_path / "nowhere").exit_code == 10


def test_options_that_do_not_go_together_are_refused(run: Run) -> None:
    for options in (["--hold"], ["--no-lease", "--lease-url", "x"], ["--no-lease", "--lease-id", "x"]):
        result = cli_run("watch", run.store, run.dest, *options)
        assert result.exit_code == 2
        assert not run.dest.exists()
    assert cli_run("watch", run.store, run.dest, "--channel", "a/b").exit_code == 3
    assert recorded(run.dest) is None


def test_watch_refuses_a_folder_that_is_busy_once(run: Run) -> None:
    holder = CheckpointTarget(run.dest)
    reader = Reader(open_store(run.store))
    reader.load()
    holder.open(reader)
    with pytest.raises(Busy):
        Watcher(str(run.store), str(run.dest)).once()
    holder.close()
