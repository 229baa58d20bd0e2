"""A real vLLM on the CPU follows a store while it samples. Run by ./scripts/test_engines.

For each model: checkpoints, each with 2 % of its values changed; a fresh load of every one by vLLM; then a server and
`deltackpt watch --engine`, which has to bring it from version to version while requests are being answered. After each
version its tokens, its log-probabilities and vLLM's own checksums of all weights must be those of the fresh load.
"""

import contextlib
import gc
import http.client
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

PATIENCE_S = 600.0
"""For a server to start, and for a version to arrive, on a machine with other work."""
PROMPTS = [[(7 * n + 3 * k) % 1000 for k in range(40)] for n in range(3)]
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # Other work runs on these cores too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
UNPACKED = """
def register():
    import vllm._custom_ops
    vllm._custom_ops._supports_onednn = False
"""
"""Where a CPU has instructions for bf16, vLLM packs linear layers by oneDNN, which lets nobody at them: all is loaded
whole there, and nothing in place. Neither the server nor the fresh loads pack them here."""
PLUGIN = ["--weight-transfer-config", '{"backend": "deltackpt"}']


class Wrong(Exception):
    """The engine did not do what it has to."""


def make(kind: str, folder: Path) -> None:
    """Write a tiny model with random weights, and a tokenizer of a thousand words."""
    import tokenizers
    import torch
    import transformers

    hf: Any = transformers
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512,
    }  # fmt: skip
    experts: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32}
    model: Any
    if kind == "qwen2-tied":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**common, tie_word_embeddings=True))
    elif kind == "llama-untied":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**common, tie_word_embeddings=False))
    elif kind == "llama-tied":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**common, tie_word_embeddings=True))
    else:
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**common, **experts, tie_word_embeddings=False))
    model.to(torch.bfloat16).save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(1000)}, unk_token="t0")
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), eos_token="t1").save_pretrained(folder)


def change(before: Path, after: Path, seed: int) -> None:
    """Write a checkpoint in which 2 % of the values are others."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(before, after)
    tensors, chance = load_file(before / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name, old in sorted(tensors.items()):
        noise = 0.05 * torch.randn(old.shape, generator=chance)
        chosen = torch.rand(old.shape, generator=chance) < 0.02
        tensors[name] = torch.where(chosen, (old.float() + noise).to(old.dtype), old)
    save_file(tensors, after / "model.safetensors", {"format": "pt"})


# ---------------------------------------------------------------- fresh loads


def fresh(root: Path, versions: int, ranks: int) -> None:
    """Load every checkpoint by vLLM and write down what it gives."""
    os.environ.update(ENV, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from vllm import LLM, SamplingParams

    for version in range(versions + 1):
        llm = LLM(
            str(root / f"v{version}"), enforce_eager=True, dtype="bfloat16", max_model_len=256, max_num_seqs=4,
            tensor_parallel_size=ranks, distributed_executor_backend="uni" if ranks == 1 else "mp",
        )  # fmt: skip
        wanted = SamplingParams(max_tokens=12, temperature=0, logprobs=3, ignore_eos=True)
        answers = []
        for prompt in PROMPTS:
            done = llm.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)[0].outputs[0]
            assert done.logprobs is not None
            own = [found[token].logprob for found, token in zip(done.logprobs, done.token_ids, strict=True)]
            answers.append([list(done.token_ids), own])
        checksums = dict(c for rank in llm.collective_rpc("compute_weight_checksums") for c in rank.items())
        (root / f"fresh-{version}.json").write_text(json.dumps({"answers": answers, "checksums": checksums}))
        # Its end takes down what the next one would have set up already.
        del llm
        gc.collect()


def prepare(kind: str, root: Path, versions: int, ranks: int = 1) -> None:
    """Write the checkpoints of a model and what fresh loads of them give. Raises Wrong."""
    root.mkdir(parents=True)
    make(kind, root / "v0")
    for version in range(1, versions + 1):
        change(root / f"v{version - 1}", root / f"v{version}", version)
    command = [str(Path(__file__).parent / "engines.py"), "--fresh", str(root), "--versions", str(versions)]
    command += ["--ranks", str(ranks)]
    with running(root / "fresh.log", *command, path=extend(root / "unpacked", "unpacked", UNPACKED)) as process:
        if process.wait(3600):
            raise Wrong(f"fresh loads failed; see {root}/fresh.log")


# ---------------------------------------------------------------- the server


def ask(port: int, method: str, path: str, body: object = None) -> Any:
    """Return the JSON that the server answers a request with."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        raw = None if body is None else json.dumps(body)
        connection.request(method, path, raw, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise Wrong(f"{method} {path}: {response.status} {answer[:300]!r}")
    return json.loads(answer) if answer else None


def complete(port: int, prompt: list[int], tokens: int) -> list[Any]:
    """Return the tokens and their log-probabilities of a greedy completion."""
    body = {
        "model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 3, "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    found = ask(port, "POST", "/v1/completions", body)["choices"][0]["logprobs"]
    return [[int(t.removeprefix("token_id:")) for t in found["tokens"]], found["token_logprobs"]]


def extend(folder: Path, name: str, code: str) -> str:
    """Write a plug-in for vLLM, of which every process calls `register`; returns what PYTHONPATH needs for it."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    (folder / f"{name}.py").write_text(code)
    return str(folder)


@contextlib.contextmanager
def running(log: Path, *command: str, path: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group of its own, which is ended with it."""
    with log.open("wb") as out:
        env = os.environ | ENV
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [path, env.get("PYTHONPATH")]))
        process = subprocess.Popen([sys.executable, *command], env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            yield process
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)


@contextlib.contextmanager
def served(root: Path, log: Path, *options: str, path: str = "") -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Serve the first version by vLLM until the end; yields its port and process. path: for its PYTHONPATH."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs; that itself does not start from vllm-cpu: it asks for the version of a package vllm.
    command = [
        "-m", "vllm.entrypoints.openai.api_server", "--model", str(root / "v0"), "--served-model-name", "m",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "256",
        "--max-num-seqs", "4", "--enforce-eager", *options,
    ]  # fmt: skip
    with running(log, *command, path=os.pathsep.join(filter(None, [path, str(root / "unpacked")]))) as server:
        until("starting the server", lambda: ask(port, "GET", "/weight_info"), server)
        yield port, server


def until(what: str, ready: Any, *processes: subprocess.Popen[bytes]) -> None:
    """Wait until `ready()` is true; the processes must live meanwhile."""
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError, Wrong):
            if ready():
                return
        if any(p.poll() is not None for p in processes):
            raise Wrong(f"{what}: a process has ended; see its log")
        if time.monotonic() > end:
            raise Wrong(f"{what}: not within {PATIENCE_S:.0f} s")
        time.sleep(0.05)


class Traffic(threading.Thread):
    """Requests without an end, so that every update meets some of them."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.over, self.answered = port, threading.Event(), 0

    def run(self) -> None:
        while not self.over.is_set():
            complete(self.port, PROMPTS[self.answered % len(PROMPTS)][:20], 60)
            self.answered += 1

    def end(self) -> int:
        """Let the last request be answered; returns how many were."""
        self.over.set()
        self.join(PATIENCE_S)
        return self.answered


def follow(root: Path, route: str, versions: int, kv: str, ranks: int) -> dict[str, Any]:
    """Let a server follow the versions by one route; returns what was measured. Raises Wrong."""
    from deltackpt import publish_folder

    work = root / f"{route}-{kv}"
    work.mkdir()
    store, dest = str(work / "store"), str(work / "dest")
    publish_folder(str(root / "v0"), store, run_id="r", step=0)
    log, answered = work / "watch.log", 0
    options = ["--tensor-parallel-size", str(ranks), *(PLUGIN if route == "plugin" else [])]
    with served(root, work / "server.log", *options) as (port, server):
        watch = [
            "-m", "deltackpt", "watch", store, dest, "--poll", "0.2", "--log", "json", "--no-lease", "--kv", kv,
            "--engine", f"vllm+http://127.0.0.1:{port}",
        ]  # fmt: skip
        with running(log, *watch) as watcher:
            for version in range(versions + 1):
                traffic = Traffic(port)
                traffic.start()
                if version:
                    publish_folder(str(root / f"v{version}"), store, run_id="r", step=version)
                until(
                    f"version {version}",
                    lambda: ask(port, "GET", "/weight_info")["weight_version"].split(".")[1:2] == [str(version)]  # noqa: B023
                    and not ask(port, "GET", "/is_paused")["is_paused"],
                    server, watcher,
                )  # fmt: skip
                answered += traffic.end()
                compare(root, port, version)
            until("the last line of the watcher", lambda: len(loads(log)) == versions + 1, watcher)
    pauses = [line["pause_ms"] for line in loads(log)]
    return {
        "versions": versions, "requests": answered, "first pause ms": round(pauses[0]),
        "pause ms, median": round(statistics.median(pauses[1:])), "pause ms, most": round(max(pauses[1:])),
        "how": sorted({line["message"].split(" in vllm+")[0].split(" ", 2)[2] for line in loads(log)}),
    }  # fmt: skip


def loads(log: Path) -> list[dict[str, Any]]:
    """Return what a watcher said of loads."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("event") == "loaded"]


def compare(root: Path, port: int, version: int) -> None:
    """Raise Wrong unless the server gives what a fresh load of the version gives."""
    wanted = json.loads((root / f"fresh-{version}.json").read_text())
    checksums = ask(port, "POST", "/weight_checker", {"action": "checksum"})["checksums"]
    if odd := sorted(n for n in {*checksums, *wanted["checksums"]} if checksums.get(n) != wanted["checksums"].get(n)):
        raise Wrong(f"version {version}: other weights than a fresh load's: {', '.join(odd[:5])} ({len(odd)} in all)")
    for prompt, answer in zip(PROMPTS, wanted["answers"], strict=True):
        if (found := complete(port, prompt, len(answer[0]))) != answer:
            raise Wrong(f"version {version}: {found} where a fresh load gives {answer}")


@click.command()
@click.option(
    "--model", "models", multiple=True, default=("qwen2-tied", "llama-untied", "qwen3-moe"), show_default=True
)
@click.option("--route", "routes", multiple=True, default=("plugin", "reload"), show_default=True)
@click.option("--versions", default=20, show_default=True)
@click.option("--kv", default="reset", show_default=True)
@click.option("--ranks", default=1, show_default=True, help="Of tensor parallelism.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder to work in; it is kept.")
@click.option("--fresh", "fresh_of", type=click.Path(path_type=Path), hidden=True)
def main(
    models: tuple[str, ...],
    routes: tuple[str, ...],
    versions: int,
    kv: str,
    ranks: int,
    work: Path | None,
    fresh_of: Path | None,
) -> None:
    """Let a real vLLM follow a store while it samples, and hold it against fresh loads."""
    if fresh_of is not None:
        fresh(fresh_of, versions, ranks)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the server ends with its test
    failed = False
    with contextlib.ExitStack() as stack:
        top = work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for kind in models:
            root = top.resolve() / kind
            prepare(kind, root, versions, ranks)
            for route in routes:
                if (kind, route) == ("qwen3-moe", "reload"):
                    click.echo(f"{kind}, {route}: left out, the driver refuses it: vLLM does not pack experts again")
                    continue
                try:
                    found = follow(root, route, versions, kv, ranks)
                    click.echo(f"{kind}, {route}: every version as a fresh load; {json.dumps(found)}")
                except Wrong as exc:
                    failed = True
                    click.echo(f"{kind}, {route}: {exc}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
