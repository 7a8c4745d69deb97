"""Checks a command line of ours against the Typer application, without running it."""

from itertools import pairwise
from pathlib import Path

import typer


def check_command_line(words, repository=None):
    """Raise unless `words` is a command line that the application accepts.

    Args:
        words: `platform` and its arguments.
        repository: if given, configuration files named there must exist below it.
    """
    from carryover.cli import app

    assert words[0] == "platform", words
    command, arguments, context = typer.main.get_command(app), list(words[1:]), None
    while hasattr(command, "get_command"):
        context = command.make_context(command.name, [], parent=context, resilient_parsing=True)
        assert arguments, f"{' '.join(words)} names no command"
        name = arguments.pop(0)
        if name.startswith("-"):
            known = [
                option for parameter in command.get_params(context) for option in parameter.opts
            ]
            assert name in known, f"no option {name} in {' '.join(words)}"
            return
        found = command.get_command(context, name)
        assert found is not None, f"no command {name!r} in {' '.join(words)}"
        command = found
    if {"-h", "--help"} & set(arguments):
        return
    command.make_context(command.name, arguments, parent=context)
    if repository is not None:
        for flag, value in pairwise(arguments):
            if flag in ("--config", "-c"):
                assert Path(repository, value).is_file(), value
