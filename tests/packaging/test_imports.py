"""Who may import whom, read from the import statements and from what really gets loaded."""

import ast
import subprocess
import sys

import pytest

PACKAGES = ("carryover", "jobs", "serve_apps", "sweeps")
# a package may import those after it
ALLOWED = {
    "sweeps": {"jobs", "serve_apps", "carryover"},
    "jobs": {"carryover"},
    "serve_apps": {"carryover"},
    "carryover": set(),
}
FRAMEWORKS = {"ray", "vllm", "mlflow"}
# rules and calculations: values in, values out
PURE = (
    "carryover.config",
    "carryover.errors",
    "carryover.decoding.acceptance",
    "carryover.training.losses",
    "carryover.training.anchors",
    "carryover.bench.statistics",
    "carryover.bench.ties",
    "carryover.bench.validity",
    "carryover.vllm_plugin.rows",
    "carryover.serving.assignment",
    "carryover.serving.observations",
    "carryover.serving.guard",
    "carryover.serving.traffic",
    "carryover.serving.changes",
    "carryover.serving.configured",
    "carryover.serving.evaluation",
    "carryover.serving.views",
)


def modules(repository):
    for package in PACKAGES:
        root = repository / "platform" if package == "carryover" else repository
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path):
    """(module, whether inside a function, whether for type checkers alone) of every import."""
    found = []

    def visit(node, inside, typing_only):
        for child in ast.iter_child_nodes(node):
            deeper = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for statement in child.body:
                    visit(ast.Module([statement], []), inside, True)
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, inside, typing_only) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                found.append((child.module, inside, typing_only))
                found.extend(
                    (f"{child.module}.{alias.name}", inside, typing_only) for alias in child.names
                )
            visit(child, deeper, typing_only)

    visit(ast.parse(path.read_text()), False, False)
    return found


@pytest.fixture(scope="module")
def graph(repository):
    return {name: imports(path) for name, path in modules(repository)}


def top(name):
    return name.split(".")[0]


def test_the_reader_sees_imports_wherever_they_are(tmp_path):
    file = tmp_path / "m.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport a.b\nif TYPE_CHECKING:\n    from c import d\n"
        "class K:\n    def f(self):\n        if True:\n            from e import g\n"
    )
    found = imports(file)
    assert ("a.b", False, False) in found
    assert ("c.d", False, True) in found
    assert ("e.g", True, False) in found


def test_packages_import_in_one_direction(graph):
    wrong = [
        f"{name} imports {module}"
        for name, found in graph.items()
        for module, _, _ in found
        if top(module) in PACKAGES
        and top(module) not in ALLOWED[top(name)] | {top(name)}
        and not name.startswith("carryover.commands.")
    ]
    assert wrong == []


def test_commands_import_jobs_inside_their_bodies_only(graph):
    wrong = [
        f"{name} imports {module}"
        for name, found in graph.items()
        if name.startswith("carryover.commands.") or name == "carryover.cli"
        for module, inside, typing_only in found
        if top(module) in ("jobs", "serve_apps", "sweeps") and not inside and not typing_only
    ]
    assert wrong == []


def test_only_tracking_imports_mlflow(graph):
    importing = {name for name, found in graph.items() if "mlflow" in {top(m) for m, _, _ in found}}
    assert importing == {"carryover.tracking"}


def test_the_plugin_never_imports_training(graph):
    for name, found in graph.items():
        if name.startswith("carryover.vllm_plugin"):
            assert not [m for m, _, _ in found if m.startswith("carryover.training")], name


@pytest.mark.parametrize("package", ["drafters", "training", "decoding"])
def test_plain_torch_packages_do_without_ray_and_mlflow(graph, package):
    for name, found in graph.items():
        if name.startswith(f"carryover.{package}"):
            assert not {top(module) for module, _, _ in found} & {"ray", "mlflow"}, name


def test_pure_files_load_no_framework(repository):
    """Not only by their own statements: by all that importing them loads."""
    known = {name for name, _ in modules(repository)}
    assert set(PURE) <= known, set(PURE) - known
    code = (
        "import importlib, sys\n"
        f"for name in {PURE!r}: importlib.import_module(name)\n"
        f"print(sorted({FRAMEWORKS!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_nothing_is_imported_from_tests(graph):
    assert not [name for name, found in graph.items() if "tests" in {top(m) for m, _, _ in found}]
