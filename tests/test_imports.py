"""Who may import whom, and what `import deltackpt` must not import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import deltackpt

PACKAGE = Path(deltackpt.__file__).parent

ORDER = [
    "errors", "digest", "layout", "partition", "manifest", "chain", "codec", "shard", "jit", "kernels", "pool",
    "memory", "local", "remote", "probe", "fsspecstore", "obstorestore", "store", "cache", "board", "checkpoint",
    "backend", "arena", "libnvcomp", "nvcomp", "trial", "launch", "window", "masks", "extraction", "staging",
    "cuda", "torchdevice", "reader", "folder", "tensors", "ownership", "holding", "slices", "ids", "live",
    "places", "plans", "scatter", "changes", "through", "module", "walk", "planned", "follow", "replica",
    "vllm", "writer", "anchor", "ground", "copies", "collective", "publish", "verify", "lease", "prune",
    "mirror", "ledger", "sidecar", "engine", "watch", "control", "weightv", "export", "ingest", "callbacks",
    "baselines", "bench", "cli", "cli_doctor", "cli_fleet", "cli_store", "cli_compat",
]  # fmt: skip
"""Each module imports only modules to its left."""

OUTSIDE = {"__init__", "__main__"}
"""They may import every module, and none may import them."""

HEAVY = (
    "torch", "numba", "llvmlite", "fsspec", "obstore", "s3fs", "botocore", "rich", "click", "safetensors", "ml_dtypes",
)  # fmt: skip


def modules() -> list[str]:
    return sorted(p.stem for p in PACKAGE.glob("*.py"))


def imported(node: ast.AST) -> list[str]:
    """Modules of the package that a statement imports."""
    if isinstance(node, ast.Import):
        names = [a.name for a in node.names]
        return [n.split(".")[1] if "." in n else "__init__" for n in names if n.split(".")[0] == "deltackpt"]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, "relative import"
    parts = (node.module or "").split(".")
    if parts[0] != "deltackpt":
        return []
    if len(parts) > 1:
        return [parts[1]]
    return [a.name if a.name in modules() else "__init__" for a in node.names]


def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def test_package_is_flat_and_every_module_has_its_place() -> None:
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir()} - {"__pycache__"}
    assert folders == set()
    assert set(modules()) - OUTSIDE <= set(ORDER)


@pytest.mark.parametrize("module", sorted(set(modules()) - OUTSIDE))
def test_module_imports_only_modules_to_its_left(module: str) -> None:
    allowed = set(ORDER[: ORDER.index(module)])
    found = {name for node in ast.walk(tree(module)) for name in imported(node)}
    assert found <= allowed, f"{module} must not import {sorted(found - allowed)}"


def test_compiled_kernels_are_imported_only_inside_functions_of_kernels() -> None:
    for module in modules():
        inside = {n for f in ast.walk(tree(module)) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
        for node in ast.walk(tree(module)):
            if "jit" in imported(node):
                assert module == "kernels", module
        top = [
            n
            for n in ast.walk(tree(module))
            if "jit" in imported(n) and ast.dump(n) not in {ast.dump(i) for i in inside}
        ]
        assert top == [], module


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_of_the_package_imports_nothing_heavy() -> None:
    heavy = run(f"import sys, deltackpt; print([m for m in {HEAVY!r} if m in sys.modules])")
    assert heavy.strip() == "[]"


def test_publisher_and_target_need_no_torch_and_no_numba() -> None:
    names = "from deltackpt import CheckpointTarget, Publisher, open_store, publish_folder"
    heavy = run(f"import sys; {names}; print([m for m in ('torch', 'numba') if m in sys.modules])")
    assert heavy.strip() == "[]"


def test_public_names_are_sorted_and_there() -> None:
    assert deltackpt.__all__ == sorted(deltackpt.__all__)
    for name in deltackpt.__all__:
        assert getattr(deltackpt, name) is not None


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        deltackpt.no_such_name  # noqa: B018  # the access is the test
