"""Nothing in the tree that must not be there: machine paths, loose ends, code that runs files."""

import ast
import re
import subprocess

import pytest

WORDS = [
    r"(?<![\w.])/" + r"(?:work|root)\b",
    r"(?<![\w.])/" + r"tmp\b",
    "TO" + "DO",
    "FIX" + "ME",
    r"\b" + "XX" + r"X\b",
    "pypi" + r"\.org",
    "download" + r"\.pytorch",
    "-----BEGIN" + " ",
]
# (module or None, function): each would run or unpickle what a file says
LOADERS = {
    ("torch", "load"), ("pickle", "load"), ("pickle", "loads"), ("pickle", "Unpickler"),
    ("joblib", "load"), ("dill", "load"), ("dill", "loads"), ("cloudpickle", "load"),
    ("cloudpickle", "loads"), ("os", "system"), ("yaml", "unsafe_load"), ("yaml", "full_load"),
    ("pandas", "read_pickle"), (None, "eval"), (None, "exec"),
}  # fmt: skip
SWITCHES = {"trust_remote_code", "shell", "allow_pickle"}


@pytest.fixture(scope="module")
def files(repository):
    """Every file that is tracked, or would be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=repository, capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode == 0:
        paths = [repository / name for name in listed.stdout.splitlines()]
    else:
        folders = ("platform", "jobs", "serve_apps", "sweeps", "infra", "docs", "tests")
        paths = [path for name in folders for path in (repository / name).rglob("*")]
    return [path for path in paths if path.is_file() and "__pycache__" not in path.parts]


def readable(path):
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def test_no_machine_paths_addresses_or_loose_ends(files, repository):
    pattern = re.compile("|".join(WORDS))
    found = [
        f"{path.relative_to(repository)}:{number}: {line.strip()[:100]}"
        for path in files
        for number, line in enumerate(readable(path).splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_the_pattern_finds_what_it_is_for():
    pattern = re.compile("|".join(WORDS))
    for text in ('open("/' + 'tmp/x")', "cd /" + "work/main", "# TO" + "DO: later"):
        assert pattern.search(text), text
    for text in ("runs/work/x", "a/tmp", "https://host.example/work", "method"):
        assert not pattern.search(text), text


def unsafe_calls(source):
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            called = (function.value.id, function.attr)
        elif isinstance(function, ast.Name):
            called = (None, function.id)
        else:
            called = None
        if called in LOADERS:
            yield node.lineno, ".".join(filter(None, called))
        for keyword in node.keywords:
            literal = isinstance(keyword.value, ast.Constant) and keyword.value.value
            if keyword.arg in SWITCHES and literal is True:
                yield node.lineno, f"{keyword.arg}=True"


def test_the_code_never_unpickles_or_runs_what_a_file_holds(files, repository):
    product = ("platform", "jobs", "serve_apps", "sweeps")
    found = [
        f"{path.relative_to(repository)}:{line}: {what}"
        for path in files
        if path.suffix == ".py" and path.relative_to(repository).parts[0] in product
        for line, what in unsafe_calls(readable(path))
    ]
    assert found == []


def test_unsafe_calls_are_recognised():
    source = "import torch\ntorch.load(p)\nload(x, trust_remote_code=True)\nrun(c, shell=False)\n"
    assert [what for _, what in unsafe_calls(source)] == ["torch.load", "trust_remote_code=True"]


def test_no_file_is_large_and_none_is_binary_but_what_ships(files, repository):
    """The drafters that the package brings, and the runs behind the results pages."""
    folders = ("platform/carryover/drafters/shipped", "docs/results", "docs/earlier_results")
    shipped = [repository / folder for folder in folders]
    files = [path for path in files if not any(path.is_relative_to(each) for each in shipped)]
    large = [str(p.relative_to(repository)) for p in files if p.stat().st_size > 500_000]
    assert large == []
    suffixes = {".pt", ".bin", ".pkl", ".safetensors", ".db", ".parquet", ".so", ".whl"}
    assert [str(path) for path in files if path.suffix in suffixes] == []
