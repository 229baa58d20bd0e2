"""The files in manifests/deploy: each parses as what it is, and every command in them is one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from helpers import REPOSITORY

from deltackpt.cli import Output, cli

DEPLOY = REPOSITORY / "manifests" / "deploy"
UNITS = ("deltackpt-prune.service", "deltackpt-prune.timer", "deltackpt-watch.service")
FILES = [
    "README.md", "cron/deltackpt", "k8s/prune-cronjob.yaml", "k8s/rbac.yaml", "k8s/sampler-sidecar.yaml",
    "s3/janitor-policy.json", "s3/lease-policy.json", "s3/lifecycle.json", "s3/publisher-policy.json",
    "s3/reader-policy.json", *(f"systemd/{unit}" for unit in UNITS),
]  # fmt: skip

Json = dict[str, Any]


def parse(words: list[str]) -> click.Context:
    """Parse a command line, without running it. Raises click's error if it is none."""
    program, name, *arguments = words
    assert program == "deltackpt"
    context = click.Context(cli, info_name=program, obj=Output())
    command = cli.get_command(context, name)
    assert command is not None, name
    return command.make_context(name, arguments, parent=context)


def documents(name: str) -> list[Json]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed, so Kubernetes files are not read")
    return list(yaml.safe_load_all((DEPLOY / "k8s" / name).read_text()))


def containers(document: Json) -> Iterator[Json]:
    spec = document["spec"]
    pod = (spec["jobTemplate"]["spec"] if "jobTemplate" in spec else spec)["template"]["spec"]
    yield from pod.get("initContainers", [])
    yield from pod["containers"]


def cron_jobs() -> list[tuple[str, list[str]]]:
    """Schedule and words of each job; what follows the command is the shell's."""
    found = []
    for line in (DEPLOY / "cron" / "deltackpt").read_text().splitlines():
        if line and not line.startswith("#") and not re.match(r"[A-Z]+=", line):
            *schedule, _user, command = line.split(maxsplit=6)
            found.append((" ".join(schedule), shlex.split(command.split(" || ")[0])))
    return found


def units() -> dict[str, dict[str, list[str]]]:
    """Settings of each unit by name."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted((DEPLOY / "systemd").iterdir()):
        settings = found.setdefault(path.name, {})
        for line in path.read_text().splitlines():
            if "=" in line and not line.startswith("#"):
                key, _, value = line.partition("=")
                settings.setdefault(key, []).append(value)
    return found


def test_files_are_those_that_the_readme_names() -> None:
    assert sorted(str(p.relative_to(DEPLOY)) for p in DEPLOY.rglob("*") if p.is_file()) == sorted(FILES)
    text = (DEPLOY / "README.md").read_text()
    for name in FILES[1:]:
        short = {"s3/lifecycle.json": name, "systemd/deltackpt-prune.timer": ".timer"}.get(name, name)
        assert short in text or name.startswith("s3/"), name


@pytest.mark.parametrize("name", FILES)
def test_file_names_no_place_of_a_real_machine(name: str) -> None:
    text = (DEPLOY / name).read_text()
    assert text.endswith("\n")
    assert re.findall(r"/home/|/root/|/Users/|\b\d{12}\b|AKIA", text) == []


# ---------------------------------------------------------------- commands


def test_every_command_of_the_units_is_one() -> None:
    lines = {name: shlex.split(unit["ExecStart"][0]) for name, unit in units().items() if "ExecStart" in unit}
    assert {name: words[:3] for name, words in lines.items()} == {
        "deltackpt-prune.service": ["/usr/bin/env", "deltackpt", "prune"],
        "deltackpt-watch.service": ["/usr/bin/env", "deltackpt", "watch"],
    }
    for words in lines.values():
        parse(words[1:])
    assert parse(lines["deltackpt-prune.service"][1:]).params["yes"] is True


def test_every_command_of_the_crontab_is_one() -> None:
    jobs = cron_jobs()
    assert [(schedule, words[1]) for schedule, words in jobs] == [
        ("* * * * *", "watch"), ("*/5 * * * *", "mirror"), ("17 * * * *", "prune"), ("47 * * * *", "prune"),
    ]  # fmt: skip
    parsed = [parse(words).params for _, words in jobs]
    assert parsed[0]["once"] is True
    assert parsed[1]["start"] == "newest"
    assert (parsed[2]["keep"], parsed[2]["keep_every"], parsed[3]["budget"]) == (100, 500, 2_000_000_000_000)
    assert "%" not in (DEPLOY / "cron" / "deltackpt").read_text()


def test_every_command_of_the_pods_is_one() -> None:
    commands = {}
    for name in ("sampler-sidecar.yaml", "prune-cronjob.yaml"):
        (document,) = documents(name)
        for container in containers(document):
            assert re.fullmatch(r"registry\.example\.com/[a-z]+:\d+\.\d+\.\d+", container["image"]), container["image"]
            if container.get("command") == ["deltackpt"]:
                commands[container["name"]] = parse(["deltackpt", *map(str, container["args"])])
    assert {name: context.info_name for name, context in commands.items()} == {"deltackpt": "watch", "prune": "prune"}
    assert (commands["deltackpt"].params["metrics_port"], commands["prune"].params["yes"]) == (9415, True)


def test_command_that_is_none_would_be_seen() -> None:
    with pytest.raises(click.UsageError):
        parse(["deltackpt", "prune", "s3://BUCKET/run7", "--keep=none"])
    with pytest.raises(click.UsageError):
        parse(["deltackpt", "watch", "s3://BUCKET/run7", "dest", "--no-such-option"])


# ---------------------------------------------------------------- systemd


@pytest.mark.parametrize("unit", UNITS)
def test_unit_is_one_to_systemd(unit: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    for name in UNITS:
        shutil.copy(DEPLOY / "systemd" / name, tmp_path / name)
    done = subprocess.run([analyze, "verify", str(tmp_path / unit)], capture_output=True, text=True, timeout=60)
    if "Failed to" in done.stderr and "bus" in done.stderr:
        pytest.skip(f"systemd-analyze cannot run here: {done.stderr.splitlines()[0]}")
    assert (done.returncode, done.stderr) == (0, "")


def test_watcher_is_started_again_unless_that_cannot_help() -> None:
    watch = units()["deltackpt-watch.service"]
    assert watch["Restart"] == ["always"]
    assert watch["RestartPreventExitStatus"] == ["2 3 20 21"]
    assert watch["KillSignal"] == ["SIGTERM"]


# ---------------------------------------------------------------- kubernetes


def test_sidecar_lets_the_engine_start_when_the_first_version_is_there() -> None:
    (document,) = documents("sampler-sidecar.yaml")
    pod = document["spec"]["template"]["spec"]
    (sidecar,), (engine,) = pod["initContainers"], pod["containers"]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert sidecar["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert engine["args"] == ["--model", f"{sidecar['args'][2]}/current"]
    assert engine["volumeMounts"][0]["readOnly"] is True
    named = {v["name"] for v in pod["volumes"]}
    assert {m["name"] for c in (sidecar, engine) for m in c["volumeMounts"]} == named


def test_pods_run_under_accounts_that_exist_without_a_token() -> None:
    accounts = {d["metadata"]["name"]: d for d in documents("rbac.yaml") if d["kind"] == "ServiceAccount"}
    assert sorted(accounts) == ["deltackpt-janitor", "deltackpt-publisher", "deltackpt-sampler"]
    assert {a["automountServiceAccountToken"] for a in accounts.values()} == {False}
    for name in ("sampler-sidecar.yaml", "prune-cronjob.yaml"):
        (document,) = documents(name)
        spec = document["spec"]
        pod = (spec["jobTemplate"]["spec"] if "jobTemplate" in spec else spec)["template"]["spec"]
        assert pod["serviceAccountName"] in accounts
        assert pod["automountServiceAccountToken"] is False


def test_role_grants_nothing_but_a_look_and_a_prune_by_hand() -> None:
    (role,) = [d for d in documents("rbac.yaml") if d["kind"] == "Role"]
    (binding,) = [d for d in documents("rbac.yaml") if d["kind"] == "RoleBinding"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"create", "get", "list"}
    assert [rule["resources"] for rule in role["rules"] if "create" in rule["verbs"]] == [["jobs"]]


# ---------------------------------------------------------------- buckets


def policy(role: str) -> list[Json]:
    document = json.loads((DEPLOY / "s3" / f"{role}-policy.json").read_text())
    assert document["Version"] == "2012-10-17"
    statements: list[Json] = document["Statement"]
    return statements


def may(role: str, action: str, key: str) -> bool:
    """Say whether a role may do something to an object, conditions left aside."""
    resource = f"arn:aws:s3:::BUCKET/run7/{key}"
    return any(
        statement["Effect"] == "Allow"
        and f"s3:{action}" in statement["Action"]
        and any(re.fullmatch(r.replace("*", ".*"), resource) for r in statement["Resource"])
        for statement in policy(role)
    )


COMMIT, SHARD, LEASE, RECORD = "manifests/0.json", "data/0-a/0", "followers/a.json", "pruned/0.json"
WRITTEN = [
    "store.json", COMMIT, SHARD, "anchors/0.json", "layouts/a.json", "placements/a.json", "partitions/a.json",
    "files/a", "channels/eval/0.json", "probe/a/0",
]  # fmt: skip
"""What a publisher has to write: a key that is missing here fails in the first bucket with a policy."""


@pytest.mark.parametrize(
    ("role", "reads", "writes", "removes"),
    [
        ("publisher", [COMMIT, SHARD, LEASE, RECORD], [COMMIT, SHARD], [SHARD]),
        ("reader", [COMMIT, SHARD, LEASE, RECORD], [], []),
        ("lease", [LEASE], [LEASE], []),
        ("janitor", [COMMIT, SHARD, LEASE, RECORD], [RECORD], [SHARD, LEASE, RECORD]),
    ],
)
def test_role_may_do_what_it_needs_and_no_more(
    role: str, reads: list[str], writes: list[str], removes: list[str]
) -> None:
    keys = (COMMIT, SHARD, LEASE, RECORD)
    assert [k for k in keys if may(role, "GetObject", k)] == reads
    assert [k for k in keys if may(role, "PutObject", k)] == writes
    assert [k for k in keys if may(role, "DeleteObject", k)] == removes


def test_who_writes_first_may_probe_the_server_and_clean_up_after_it() -> None:
    assert [k for k in WRITTEN if not may("publisher", "PutObject", k)] == []
    for role in ("publisher", "janitor"):
        assert [may(role, action, "probe/a/0") for action in ("PutObject", "GetObject", "DeleteObject")] == [True] * 3


def test_reader_may_list_so_that_what_is_not_there_is_seen_to_be_not_there() -> None:
    for role in ("publisher", "reader", "janitor"):
        assert any("s3:ListBucket" in s["Action"] for s in policy(role)), role


def test_publisher_cannot_overwrite_a_manifest() -> None:
    (deny,) = [s for s in policy("publisher") if s["Effect"] == "Deny"]
    assert deny["Action"] == ["s3:PutObject"]
    assert "arn:aws:s3:::BUCKET/run7/manifests/*" in deny["Resource"]
    assert deny["Condition"]["Null"] == {"s3:if-none-match": "true"}


def test_lifecycle_removes_no_data() -> None:
    rules = json.loads((DEPLOY / "s3" / "lifecycle.json").read_text())["Rules"]
    assert [r["Filter"]["Prefix"] for r in rules if "Expiration" in r] == ["run7/followers/", "run7/probe/"]
    assert [r["AbortIncompleteMultipartUpload"] for r in rules if "Expiration" not in r] == [{"DaysAfterInitiation": 2}]
