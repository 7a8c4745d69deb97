"""`platform traffic`: see and change how requests are split between the arms of an endpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carryover.commands.options import console, examples, log_console

if TYPE_CHECKING:
    from carryover.serving.admin import AdminClient

UrlOption = Annotated[
    str,
    typer.Option("--url", metavar="URL", envvar="CARRYOVER_URL", help="The endpoint."),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        help="Holds the admin key; default: CARRYOVER_ADMIN_KEY, else runs/serve/*/admin.key.",
    ),
]
WhyOption = Annotated[
    str, typer.Option("--why", "-m", metavar="TEXT", help="The reason, for the audit log.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

DEFAULT_URL = "http://127.0.0.1:8000"
WATCH_S = 1.0


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    add = group.command
    add(
        epilog=examples(
            "platform traffic show", "platform traffic show --watch",
            "platform traffic show --json --url http://127.0.0.1:8080",
        )
    )(show)  # fmt: skip
    add(
        "set",
        epilog=examples(
            "platform traffic set baseline=90 carryover=10 -m 'first real traffic'",
            "platform traffic set baseline=0.5 carryover=0.5",
            "platform traffic set --shadow carryover=10",
            "platform traffic set baseline=50 carryover=50 --experiment second-drafter",
        ),
    )(set_split)
    add(
        epilog=examples(
            "platform traffic ramp 1,5,25,50",
            "platform traffic ramp 5,50,100 --arm carryover --hold-s 600 -m 'evening ramp'",
        )
    )(ramp)
    add(epilog=examples("platform traffic pause -m 'incident 12'"))(pause)
    add(epilog=examples("platform traffic resume"))(resume)
    add(epilog=examples("platform traffic rollback -m 'users report repetitions'"))(rollback)
    add(epilog=examples("platform traffic revoke team-a -m 'key leaked'"))(revoke)
    add(epilog=examples("platform traffic log", "platform traffic log --last 100 --json"))(log)
    add(epilog=examples("platform traffic report --out report.html"))(report)
    add(epilog=examples("platform traffic stop -m 'decided for carryover'"))(stop)
    app.add_typer(group, name="traffic", help="Split live traffic between arms.")


def show(
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Keep the table up to date until Ctrl-C.")
    ] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key_file: KeyFileOption = None,
) -> None:
    """Show the split, what each arm does with its requests, and the verdicts so far.

    Only requests whose arm was chosen by chance are compared. The intervals hold however often you
    look.
    """
    from carryover.commands.traffic_display import overview_view

    with _connect(url, key_file) as client:
        answer = client.ask("show")
        if as_json:
            _print_json(answer)
            return
        out = console()
        if not watch or not out.is_terminal:
            out.print(overview_view(answer))
            return
        _watch(client, answer)


def set_split(
    weights: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARM=WEIGHT...",
            help="Percent (sum 100) or fractions (sum 1); an arm not named gets nothing.",
        ),
    ] = None,
    shadow: Annotated[
        str | None,
        typer.Option(
            "--shadow",
            metavar="ARM=PERCENT",
            help="Copy so many of the requests to this arm; nobody gets its answers.",
        ),
    ] = None,
    no_shadow: Annotated[bool, typer.Option("--no-shadow", help="Copy nothing.")] = False,
    experiment: Annotated[
        str | None,
        typer.Option(
            "--experiment", metavar="NAME", help="Begin this one, after the last was stopped."
        ),
    ] = None,
    why: WhyOption = "",
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key_file: KeyFileOption = None,
) -> None:
    """Set the weights of the arms, at the same instant in every replica of the endpoint.

    No engine restarts and requests in flight finish where they are. Sticky keys stay on their arm,
    save for the share that must move. Ends a ramp and a pause.
    """
    from carryover.errors import ConfigError

    if not weights and shadow is None and not no_shadow:
        raise ConfigError("say what to set, for example: platform traffic set ARM=90 ARM=10")
    arguments: dict[str, Any] = {"no_shadow": no_shadow, "experiment": experiment}
    if weights:
        pairs = [_assignment(text) for text in weights]
        arguments["weights"] = dict(pairs)
        if len(arguments["weights"]) < len(pairs):
            raise ConfigError(f"an arm is named twice: {' '.join(weights)}")
    if shadow is not None:
        arm, percent = _assignment(shadow)
        if not 0 < percent <= 100:
            raise ConfigError(f"--shadow takes a percentage above 0, up to 100, got {percent:g}")
        arguments["shadow"] = {"arm": arm, "share": percent / 100}
    _change("set", arguments, why=why, as_json=as_json, url=url, key_file=key_file)


def ramp(
    steps: Annotated[str, typer.Argument(metavar="PERCENT,...", help="Increasing, as in 1,5,25.")],
    arm: Annotated[
        str | None,
        typer.Option("--arm", metavar="ARM", help="Default: the only one beside the control."),
    ] = None,
    hold_s: Annotated[
        float, typer.Option("--hold-s", min=0.0, help="Shortest time at each step, in seconds.")
    ] = 0.0,
    why: WhyOption = "",
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key_file: KeyFileOption = None,
) -> None:
    """Raise an arm's share step by step; each step needs a successful evaluation of the last.

    Successful means: enough requests at this step, no rule of the guard broken, and the arm not
    known to be worse than the control in errors or TPOT. A broken rule sends everything back to the
    control arm. To stop at a step, set the weights it has.
    """
    from carryover.errors import ConfigError

    try:
        parsed = [float(step.strip().removesuffix("%")) for step in steps.split(",")]
    except ValueError:
        parsed = [math.nan]
    if not all(map(math.isfinite, parsed)):
        raise ConfigError(
            f"ramp steps are percentages with commas between, as in 1,5,25,50; got {steps!r}"
        )
    arguments = {"steps": parsed, "arm": arm, "hold_s": hold_s}
    _change("ramp", arguments, why=why, as_json=as_json, url=url, key_file=key_file)


def pause(
    why: WhyOption = "",
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key_file: KeyFileOption = None,
) -> None:
    """Send everything to the control arm for now; weights, shadow and ramp are kept."""
    _change("pause", {}, why=why, as_json=as_json, url=url, key_file=key_file)


def resume(
    why: WhyOption = "",
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key_file: KeyFileOption = None,
) -> None:
    """End a pause: weights, shadow and ramp go on as they were."""
    _change("resume", {}, why=why, as_json=as_json, url=url, key_file=key_file)


def rollback(
    why: WhyOption = "",
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key_file: KeyFileOption = None,
) -> None:
    """Send everything to the control arm at once, and end ramp, pause and shadow."""
    _change("rollback", {}, why=why, as_json=as_json, url=url, key_file=key_file)


def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY-ID", help="The id, not the key.")],
    why: WhyOption = "",
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key_file: KeyFileOption = None,
) -> None:
    """No longer accept an API key, from the next second on and after restarts too."""
    _change("revoke", {"key": key}, why=why, as_json=as_json, url=url, key_file=key_file)


def log(
    last: Annotated[
        int, typer.Option("--last", "-n", min=1, max=10_000, help="Entries to show.")
    ] = 20,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key_file: KeyFileOption = None,
) -> None:
    """Show who changed the split, when, from what to what, and why; the newest last."""
    from carryover.commands.traffic_display import log_text

    with _connect(url, key_file) as client:
        answer = client.ask("log", {"last": last})
    if as_json:
        _print_json(answer)
        return
    console().print(log_text(answer["entries"]), end="", highlight=False, soft_wrap=True)
    if answer["unreadable"]:
        log_console().print(
            f"[yellow]note:[/] {answer['unreadable']} lines of the log were cut short by a crash"
        )


def report(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")
    ] = Path("traffic.html"),
    url: UrlOption = DEFAULT_URL,
    key_file: KeyFileOption = None,
) -> None:
    """Write a page with the experiment's plots and tables, which opens without a network."""
    from carryover.errors import ConfigError
    from carryover.serving.report import render

    with _connect(url, key_file) as client:
        answer = client.ask("report")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(render(answer), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}; choose another --out") from None
    console().print(str(out), markup=False, highlight=False, soft_wrap=True)


def stop(
    why: WhyOption = "",
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key_file: KeyFileOption = None,
) -> None:
    """End the experiment: everything to the control arm, and the final verdicts to MLflow.

    `platform traffic set --experiment NAME` begins the next one, with empty statistics.
    """
    from carryover.commands.traffic_display import comparison_table

    answer = _change("stop", {}, why=why, as_json=as_json, url=url, key_file=key_file)
    if as_json:
        return
    out, remarks = console(), log_console()
    if answer["comparisons"]:
        out.print(comparison_table(answer))
    if answer["run_id"] is not None and not answer["unrecorded"]:
        remarks.print(
            f"MLflow run {answer['run_id']} (see it with `platform ui`)", highlight=False
        )
    elif answer["unrecorded"]:
        remarks.print("[yellow]not in MLflow:[/]", answer["unrecorded"], highlight=False)
    remarks.print(
        "next: platform traffic set --experiment NAME ARM=WEIGHT ...", highlight=False, markup=False
    )


def _connect(url: str, key_file: Path | None) -> AdminClient:
    from carryover.serving.admin import AdminClient, read_key

    return AdminClient(url, key=read_key(key_file))


def _change(
    action: str, arguments: dict[str, Any], *, why: str, as_json: bool, url: str,
    key_file: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Have the split changed, and say what holds now."""
    from carryover.commands.traffic_display import change_line
    from carryover.serving.admin import person

    with _connect(url, key_file) as client:
        answer = client.ask(action, {**arguments, "why": why, "who": person()})
    if as_json:
        _print_json(answer)
    else:
        console().print(change_line(action, answer), highlight=False, soft_wrap=True)
    if answer["late"]:
        log_console().print(
            "[yellow]warning:[/] the change is made and logged, but these replicas have not "
            f"confirmed it yet: {', '.join(answer['late'])}; see `platform traffic show`",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        raise typer.Exit(1)
    return answer


def _watch(client: AdminClient, answer: dict[str, Any]) -> None:
    """Redraw until Ctrl-C; an endpoint that is away for a while is waited for."""
    import time

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from carryover.commands.traffic_display import overview_view
    from carryover.errors import UserError

    with Live(overview_view(answer), console=console(), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(WATCH_S)
                try:
                    answer = client.ask("show")
                    live.update(overview_view(answer), refresh=True)
                except UserError as error:
                    stale = Text(f"no longer up to date: {error}", style="yellow")
                    live.update(Group(overview_view(answer), stale), refresh=True)
        except KeyboardInterrupt:
            return


def _assignment(text: str) -> tuple[str, float]:
    from carryover.errors import ConfigError

    arm, separator, number = text.partition("=")
    try:
        value = float(number.strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    if not separator or not arm or not math.isfinite(value):
        raise ConfigError(f"expected ARM=NUMBER, as in carryover=10, got {text!r}")
    return arm.strip(), value


def _print_json(answer: dict[str, Any]) -> None:
    typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
