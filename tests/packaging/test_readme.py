"""What the documentation tells people to type exists."""

import re
import shlex

import pytest
from command_lines import check_command_line

LINE = re.compile(r"^(?:\$ )?(?P<command>[^#]*?)\s*(?:#.*)?$")
# programs of others that the documentation may use; what they do is not ours to check
OTHERS = {"source", "docker", "kubectl", "curl", "git", "export", "cd", "pip", "vllm", "ray"}


def documents(repository):
    return [
        repository / "README.md",
        repository / "infra" / "README.md",
        *sorted((repository / "docs").glob("*.md")),
    ]


def commands(text):
    """Command lines of every ```bash block; a trailing backslash joins lines."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = LINE.match(line)["command"].strip()
            if command:
                yield command


@pytest.fixture(scope="module")
def targets(repository):
    return set(re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(), re.MULTILINE))


def test_every_command_exists(repository, targets):
    checked = 0
    for document in documents(repository):
        for command in commands(document.read_text()):
            words = shlex.split(command)
            program = words[0]
            if program in ("platform", ".venv/bin/platform"):
                check_command_line(["platform", *words[1:]], repository)
            elif program == "make":
                assert set(words[1:]) <= targets, command
            elif program.startswith("infra/"):
                assert (repository / program).is_file(), command
            elif program in ("python", ".venv/bin/python") and words[1] == "-m":
                name = words[2].replace(".", "/")
                roots = (repository, repository / "platform")
                assert any((root / f"{name}.py").is_file() for root in roots), command
            else:
                assert program in OTHERS, f"{document.name}: {command}"
            checked += 1
    assert checked >= 5


def test_files_that_the_documentation_names_exist(repository):
    for document in documents(repository):
        for name in re.findall(r"\]\((?!https?:|#)([^)]+)\)", document.read_text()):
            assert (document.parent / name.partition("#")[0]).exists(), f"{document.name}: {name}"


def test_the_reader_of_documents():
    block = "make demo    # set up\n# only a remark\n$ platform serve \\\n  --config a.yaml\n"
    text = f"x\n```bash\n{block}```\n"
    assert [shlex.split(command) for command in commands(text)] == [
        ["make", "demo"],
        ["platform", "serve", "--config", "a.yaml"],
    ]


def test_make_targets_describe_themselves(repository, targets):
    described = set(
        re.findall(r"^([a-z-]+):.*## ", (repository / "Makefile").read_text(), re.MULTILINE)
    )
    assert described == targets
