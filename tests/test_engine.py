"""Engines driven over HTTP: the order of requests, and a failure at each of them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import make_cases
import numpy as np
import pytest
from engines import Double, Fault, PluginDouble, SglangDouble, SidecarDouble, VllmDouble, serving
from helpers import cli_run
from safetensors.numpy import save_file
from watching import Script, Told, start

from deltackpt.control import metrics
from deltackpt.engine import Engine, EngineFailed, Loaded
from deltackpt.errors import ConfigError
from deltackpt.publish import publish_folder
from deltackpt.watch import Watcher

Kv = Literal["reset", "keep"]

LOAD = {
    ("vllm", "reset"): [
        "GET /weight_info", "GET /server_info", "GET /is_paused", "POST /pause", "POST /collective_rpc",
        "POST /reset_prefix_cache", "POST /update_weight_version", "GET /weight_info", "POST /resume",
    ],
    ("vllm", "keep"): [
        "GET /weight_info", "GET /server_info", "GET /is_paused", "POST /pause", "POST /collective_rpc",
        "POST /update_weight_version", "GET /weight_info", "POST /resume",
    ],
    ("sglang", "reset"): [
        "GET /model_info", "GET /server_info", "POST /pause_generation", "GET /flush_cache",
        "POST /update_weights_from_disk", "GET /model_info", "POST /continue_generation",
    ],
    ("sglang", "keep"): [
        "GET /model_info", "GET /server_info", "POST /pause_generation",
        "POST /update_weights_from_disk", "GET /model_info", "POST /continue_generation",
    ],
}  # fmt: skip
"""Requests of one load, in order."""

PLUGIN = [
    "GET /weight_info", "GET /server_info", "GET /is_paused", "POST /init_weight_transfer_engine",
    "GET /get_world_size", "POST /start_weight_update", "POST /update_weights", "POST /finish_weight_update",
    "POST /pause", "POST /start_weight_update", "POST /update_weights", "POST /reset_prefix_cache",
    "POST /finish_weight_update", "GET /weight_info", "POST /resume",
]  # fmt: skip
"""The same with the plug-in."""

WAYS: list[tuple[str, Kv]] = [("vllm", "reset"), ("vllm", "keep"), ("sglang", "reset"), ("sglang", "keep")]


def make(kind: str) -> Double:
    return VllmDouble() if kind == "vllm" else SglangDouble()


@pytest.fixture(params=["vllm", "sglang"])
def double(request: pytest.FixtureRequest) -> Iterator[Double]:
    with serving(make(request.param)) as served:
        yield served


def folder(root: Path, version: int) -> str:
    """A checkpoint whose weights are a word."""
    made = root / f"v{version}"
    made.mkdir(exist_ok=True)
    (made / "weights").write_text(f"weights {version}")
    return str(made)


def driven(double: Double, root: Path, kv: Kv = "reset", **options: Any) -> Engine:
    """A process that drives the double: it knows no more than is on disk."""
    sidecar = options.pop("sidecar", None) or SidecarDouble(root / "own")
    return Engine(double.url, sidecar, kv=kv, draft=options.pop("draft", None), **options)


def require_at(double: Double, root: Path, version: int) -> None:
    """Assert that the engine samples from a version, whole, and that nothing is owed to it."""
    assert (double.weights, double.version) == (f"weights {version}", f"l.{version}.d")
    assert (double.is_paused, double.broken) == (False, [])
    assert not (root / "own" / "owed.json").exists()


@pytest.mark.parametrize(("kind", "kv"), WAYS)
def test_load_is_made_of_these_requests_in_this_order(kind: str, kv: Kv, tmp_path: Path) -> None:
    with serving(make(kind)) as double:
        engine = driven(double, tmp_path, kv)
        loaded = engine.reach(1, "l.1.d", folder(tmp_path, 1))
        assert double.calls == LOAD[kind, kv]
        assert loaded.weight_version == "l.1.d"
        assert loaded.pause_ms is not None
        require_at(double, tmp_path, 1)


def test_engine_that_says_it_has_the_version_is_asked_nothing_else(double: Double, tmp_path: Path) -> None:
    engine = driven(double, tmp_path)
    engine.reach(1, "l.1.d", folder(tmp_path, 1))
    double.calls.clear()
    assert engine.reach(1, "l.1.d", folder(tmp_path, 1)) == Loaded("l.1.d", None)
    assert len(double.calls) == 1


def test_engine_that_was_restarted_is_loaded_again(double: Double, tmp_path: Path) -> None:
    engine = driven(double, tmp_path)
    engine.reach(1, "l.1.d", folder(tmp_path, 1))
    double.restart()
    engine.reach(1, "l.1.d", folder(tmp_path, 1))
    require_at(double, tmp_path, 1)


@pytest.mark.parametrize("again", [True, False], ids=["same-process", "restarted"])
@pytest.mark.parametrize("how", ["before", "half", "after"])
@pytest.mark.parametrize(("kind", "kv"), WAYS)
def test_failure_at_any_request_never_resumes_a_mix_and_is_mended_by_the_next_try(
    kind: str, kv: Kv, how: Fault, again: bool, tmp_path: Path
) -> None:
    requests = LOAD[kind, kv]
    for at, request in enumerate(requests):
        with serving(make(kind)) as double:
            root = tmp_path / str(at)
            root.mkdir()
            engine = driven(double, root, kv)
            engine.reach(1, "l.1.d", folder(root, 1))
            double.fail(at, how)
            with pytest.raises(EngineFailed, match="the next poll tries again") as failed:
                engine.reach(2, "l.2.d", folder(root, 2))
            text = str(failed.value)
            assert request in text
            pause = requests.index("POST /pause" if kind == "vllm" else "POST /pause_generation")
            if at < pause:
                require_at(double, root, 1)
                assert "; it goes on with what it had; " in text
            elif at == pause:
                assert "; it may stand still, with weights l.1.d as before; " in text
            elif at < len(requests) - 1:
                assert double.is_paused
                assert "; it is paused, with weights that may be a mix of two versions; " in text
            else:
                assert "; it may stand still, with version 2 whole; " in text
            if not again:
                engine = driven(double, root, kv)
            engine.reach(2, "l.2.d", folder(root, 2))
            require_at(double, root, 2)


@pytest.fixture
def plugged(tmp_path: Path) -> Iterator[PluginDouble]:
    with serving(PluginDouble(tmp_path)) as served:
        assert isinstance(served, PluginDouble)
        yield served


def test_plug_in_stages_before_the_pause_and_applies_in_place(plugged: PluginDouble, tmp_path: Path) -> None:
    loaded = driven(plugged, tmp_path).reach(1, "l.1.d", folder(tmp_path, 1))
    assert plugged.calls == PLUGIN
    assert loaded.how == "applied in place"
    assert list((tmp_path / "own").glob("changes-*")) == []
    require_at(plugged, tmp_path, 1)


@pytest.mark.parametrize("who", ["plan", "sidecar", "worker"])
def test_what_cannot_be_applied_is_loaded_whole_and_it_is_said_why(
    who: str, plugged: PluginDouble, tmp_path: Path
) -> None:
    sidecar = SidecarDouble(tmp_path / "own")
    if who == "plan":
        plugged.refused = "scales are computed"
    elif who == "sidecar":
        sidecar.why_whole = "scales are computed"
    else:
        plugged.why_whole = "scales are computed"
    loaded = driven(plugged, tmp_path, sidecar=sidecar).reach(1, "l.1.d", folder(tmp_path, 1))
    (body,) = [b for b in plugged.bodies if "path" in str(b)]
    assert body == {"update_info": {"path": str(tmp_path / "v1")}}
    assert loaded.how == "loaded whole: scales are computed"
    assert sidecar.states == (set() if who == "plan" else {0xFF})
    require_at(plugged, tmp_path, 1)


def test_stage_that_fails_in_one_worker_pauses_nobody(plugged: PluginDouble, tmp_path: Path) -> None:
    plugged.failed = "IntegrityError: a frame is damaged"
    with pytest.raises(EngineFailed, match="staging version 1: IntegrityError: a frame is damaged; it goes on"):
        driven(plugged, tmp_path).reach(1, "l.1.d", folder(tmp_path, 1))
    assert plugged.pauses == 0


def test_worker_that_never_reports_is_given_up(plugged: PluginDouble, tmp_path: Path) -> None:
    slept: list[float] = []
    (tmp_path / "own").mkdir()
    report = '{"token": "of another stage", "state": "planned", "text": "", "weights": null}'
    (tmp_path / "own" / "worker-0.json").write_text(report)
    plugged._report = lambda *_: None  # type: ignore[method-assign]  # a worker that hangs
    with pytest.raises(EngineFailed, match="worker 0 has not planned within 300 s"):
        driven(plugged, tmp_path, sleep=slept.append).reach(1, "l.1.d", folder(tmp_path, 1))
    assert sum(slept) == pytest.approx(300)
    assert plugged.pauses == 0


@pytest.mark.parametrize("how", ["before", "half", "after"])
def test_failure_at_any_request_to_the_plug_in_is_mended_by_a_new_process(how: Fault, tmp_path: Path) -> None:
    for at, request in enumerate(PLUGIN):
        root = tmp_path / str(at)
        root.mkdir()
        with serving(PluginDouble(root)) as double:
            driven(double, root).reach(1, "l.1.d", folder(root, 1))
            double.fail(at, how)
            if request == "POST /start_weight_update" and how != "after":
                # It is taken for one that was left open, ended, and begun again.
                driven(double, root).reach(2, "l.2.d", folder(root, 2))
            else:
                with pytest.raises(EngineFailed, match=request) as failed:
                    driven(double, root).reach(2, "l.2.d", folder(root, 2))
                mixed = PLUGIN.index("POST /pause") < at < len(PLUGIN) - 1
                assert ("may be a mix" in str(failed.value)) == mixed
                if mixed:
                    assert double.is_paused
                driven(double, root).reach(2, "l.2.d", folder(root, 2))
            double.broken = [b for b in double.broken if b != "started twice"]
            require_at(double, root, 2)


def test_newer_version_mends_a_mix_too(double: Double, tmp_path: Path) -> None:
    engine = driven(double, tmp_path, "keep")
    double.fail(3 if double.scheme == "sglang" else 4, "half")
    with pytest.raises(EngineFailed, match="may be a mix"):
        engine.reach(1, "l.1.d", folder(tmp_path, 1))
    engine.reach(2, "l.2.d", folder(tmp_path, 2))
    require_at(double, tmp_path, 2)


def test_engine_that_tells_another_version_after_a_load_is_not_resumed(double: Double, tmp_path: Path) -> None:
    asked = []

    class Deaf:
        def __getattr__(self, name: str) -> Callable[..., object]:
            asked.append(name)
            return {"held": lambda: "default", "paused": lambda: False}.get(name, lambda *_: None)

    engine = driven(double, tmp_path, driver=Deaf())
    with pytest.raises(EngineFailed, match=r"default after loading l\.1\.d; it is paused"):
        engine.reach(1, "l.1.d", folder(tmp_path, 1))
    assert "resume" not in asked


def test_engine_that_somebody_has_paused_stays_paused(tmp_path: Path) -> None:
    with serving(VllmDouble()) as double:
        double.is_paused = True
        engine = driven(double, tmp_path)
        double.fail(4, "half")
        with pytest.raises(EngineFailed):
            engine.reach(1, "l.1.d", folder(tmp_path, 1))
        engine.reach(1, "l.1.d", folder(tmp_path, 1))
        assert (double.weights, double.version, double.is_paused) == ("weights 1", "l.1.d", True)
        assert "POST /resume" not in double.calls


@pytest.mark.parametrize(("kv", "holds"), [("reset", "weights 1"), ("keep", "as started")])
def test_cached_keys_are_made_again_or_kept_as_asked_for(kv: Kv, holds: str, tmp_path: Path) -> None:
    with serving(VllmDouble()) as double:
        driven(double, tmp_path, kv).reach(1, "l.1.d", folder(tmp_path, 1))
        assert double.kv_of == holds


def test_sglang_is_flushed_again_while_requests_end(tmp_path: Path) -> None:
    slept: list[float] = []
    with serving(SglangDouble()) as double:
        assert isinstance(double, SglangDouble)
        double.busy_flushes = 59
        driven(double, tmp_path, sleep=slept.append).reach(1, "l.1.d", folder(tmp_path, 1))
        require_at(double, tmp_path, 1)
        assert slept == [1.0] * 59
        double.busy_flushes = 60
        with pytest.raises(EngineFailed, match="GET /flush_cache was answered with 400"):
            driven(double, tmp_path, sleep=slept.append).reach(2, "l.2.d", folder(tmp_path, 2))
        assert double.is_paused


def test_engine_with_adapters_is_refused_before_it_is_paused(double: Double, tmp_path: Path) -> None:
    if isinstance(double, VllmDouble):
        double.config["lora_config"] = {"max_loras": 1}
    elif isinstance(double, SglangDouble):
        double.server_info["lora_paths"] = ["a"]
    with pytest.raises(ConfigError, match="serves LoRA adapters"):
        driven(double, tmp_path).reach(1, "l.1.d", folder(tmp_path, 1))
    assert double.pauses == 0


def with_draft(double: Double) -> None:
    if isinstance(double, VllmDouble):
        double.config["speculative_config"] = {"model": "small", "draft_model_config": {"model": "small"}}
    elif isinstance(double, SglangDouble):
        double.server_info["speculative_draft_model_path"] = "small"


def test_draft_model_is_refused_unless_it_was_said_that_it_stays(double: Double, tmp_path: Path) -> None:
    with_draft(double)
    with pytest.raises(ConfigError, match=r"has a draft model \(small\), which would go stale; say --draft none"):
        driven(double, tmp_path).reach(1, "l.1.d", folder(tmp_path, 1))
    with pytest.raises(ConfigError, match=r"draft model \(small\) cannot be updated by this route"):
        driven(double, tmp_path, draft="follow").reach(1, "l.1.d", folder(tmp_path, 1))
    assert double.pauses == 0
    driven(double, tmp_path, draft="none").reach(1, "l.1.d", folder(tmp_path, 1))
    require_at(double, tmp_path, 1)


def test_draft_that_shall_follow_must_be_there(double: Double, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no draft model that could follow"):
        driven(double, tmp_path, draft="follow").reach(1, "l.1.d", folder(tmp_path, 1))


def test_n_gram_speculation_is_no_draft_model(tmp_path: Path) -> None:
    with serving(VllmDouble()) as double:
        assert isinstance(double, VllmDouble)
        double.config["speculative_config"] = {"method": "ngram", "draft_model_config": None}
        driven(double, tmp_path).reach(1, "l.1.d", folder(tmp_path, 1))
        require_at(double, tmp_path, 1)


def test_experts_on_a_cpu_need_the_plug_in(tmp_path: Path) -> None:
    names = ["model.layers.0.mlp.experts.0.up_proj.weight", "model.norm.weight"]
    with serving(VllmDouble()) as double:
        assert isinstance(double, VllmDouble)
        double.config["device_config"] = {"device": "cpu"}
        for version, held in ((1, names[1:]), (2, names)):
            made = Path(folder(tmp_path, version))
            save_file({name: np.zeros(2, np.float32) for name in held}, made / "model.safetensors")
        driven(double, tmp_path).reach(1, "l.1.d", str(tmp_path / "v1"))
        with pytest.raises(ConfigError, match=r"does not pack experts \(model\.layers\.0\.mlp\.experts\.0"):
            driven(double, tmp_path).reach(2, "l.2.d", str(tmp_path / "v2"))
        require_at(double, tmp_path, 1)
        double.config["device_config"] = {"device": "cuda"}
        driven(double, tmp_path).reach(2, "l.2.d", str(tmp_path / "v2"))
        require_at(double, tmp_path, 2)


def test_server_without_the_routes_is_a_matter_of_its_configuration(tmp_path: Path) -> None:
    class Bare(Double):
        def answer(self, *_: object) -> object:
            return None

    with serving(Bare()) as double:
        double.url = "vllm" + double.url
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
            driven(double, tmp_path).reach(1, "l.1.d", folder(tmp_path, 1))


def test_engine_that_is_not_there_goes_on_with_what_it_had(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        url = f"vllm+http://127.0.0.1:{taken.getsockname()[1]}"
        engine = Engine(url, SidecarDouble(tmp_path), kv="keep", draft=None)
        with pytest.raises(EngineFailed, match=r"GET /weight_info: .*refused; it goes on with what it had"):
            engine.reach(1, "l.1.d", str(tmp_path))


@pytest.mark.parametrize(
    "url", ["http://h:1", "vllm+http://h", "vllm+http://:1", "vllm+http://h:x", "vllm+http://h:1/v1", "sglang+https://h:1"]
)  # fmt: skip
def test_url_of_an_engine_is_checked_at_the_start(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected vllm\+http://HOST:PORT or sglang\+http://HOST:PORT"):
        Engine(url, SidecarDouble(tmp_path), kv="keep", draft=None)


# ---------------------------------------------------------------- by a watcher


def weights_in(folder: Path) -> str:
    return "".join(file.read_bytes().hex() for file in sorted(folder.glob("*.safetensors")))


class Follows(VllmDouble):
    """A vLLM whose weights are the checkpoint's bytes."""

    def load(self, folder: str, half: bool) -> None:
        super().load(str(Path(__file__).parent), half=True)
        if not half:
            self.weights = weights_in(Path(folder))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_cases.chain(tmp_path, 2)
    for version in (0, 1):
        publish_folder(tmp_path / f"v{version}", tmp_path / "store", run_id="r", anchors=False)
    return tmp_path


def watched(run: Path, double: Double, *acts: Callable[[], object], **options: Any) -> tuple[Watcher, Script]:
    own = str(run / "dest" / ".deltackpt" / "engine")
    engine = Engine(double.url, SidecarDouble(Path(own)), kv="reset", draft=None)
    return start(run / "store", run / "dest", *acts, engine=engine, **options)


def weights_of(run: Path, version: int) -> str:
    return weights_in(run / f"v{version}")


def test_watcher_brings_the_engine_along_and_tells_what_it_read_back(run: Path) -> None:
    told = Told()
    with serving(Follows()) as double:
        states = []

        def publish() -> None:
            states.append(watcher.state)
            assert double.weights == weights_of(run, 1)
            publish_folder(run / "v2", run / "store", run_id="r", anchors=False)

        watcher, _ = watched(run, double, publish, lambda: states.append(watcher.state), told=told)
        watcher.run()
        assert double.weights == weights_of(run, 2)
        assert double.broken == []
        assert told.names() == ["opened", "applied", "loaded", "applied", "loaded"]
        for state in states:
            assert state.engine == double.url
            assert state.engine_version == state.weight_version != "default"
        assert [state.applied for state in states] == [1, 2]
        text = metrics(watcher.state)
        assert "deltackpt_pause_ms " in text


def test_watcher_that_finds_its_folder_up_to_date_asks_the_engine_all_the_same(run: Path) -> None:
    with serving(Follows()) as double:
        watched(run, double)[0].once()
        double.restart()
        watched(run, double)[0].once()
        assert (double.weights, double.pauses) == (weights_of(run, 1), 2)


def test_engine_that_fails_is_tried_by_every_poll_and_the_hook_waits_for_it(run: Path) -> None:
    told = Told()
    out = run / "out"
    with serving(Follows()) as double:
        double.fail(4, "half")

        def look() -> None:
            assert not out.exists()
            assert (double.is_paused, watcher.state.engine_version) == (True, None)
            assert watcher.state.last_error is not None

        watcher, _ = watched(run, double, look, told=told, command=f"echo $DELTACKPT_VERSION >> {out}")
        watcher.run()
        (line,) = told.lines("error")
        assert "POST /collective_rpc was answered with 500" in line
        assert (double.weights, double.is_paused, double.broken) == (weights_of(run, 1), False, [])
        assert out.read_text() == "1\n"
        assert watcher.state.last_error is None


def test_engine_needs_a_folder_in_switch_mode(run: Path) -> None:
    with serving(Follows()) as double, pytest.raises(ConfigError, match="an engine loads from a folder in switch mode"):
        watched(run, double, mode="replace")


def test_command_line_drives_an_engine(run: Path) -> None:
    with serving(Follows()) as double:
        arguments = [run / "store", run / "dest", "--once", "--no-lease", "--engine", double.url, "--kv", "keep"]
        result = cli_run("watch", *arguments, "--json")
        assert result.exit_code == 0, result.output
        fields = json.loads(result.stdout)
        assert fields["engine_version"] == fields["weight_version"] == double.version
        assert f"driving {double.url} (kv keep, draft refused)" in result.stderr
    assert cli_run("watch", run / "store", run / "dest", "--draft", "none").exit_code == 2
