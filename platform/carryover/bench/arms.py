"""Which arms an endpoint has, and whether they may be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from carryover.bench.client import authorization
from carryover.errors import ConfigError, ServingError


def find_arms(url: str, *, wanted: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Ask an endpoint for its arms: model id to description (empty for other servers' models).

    Args:
        url: base URL, without `/v1`.
        wanted: the arms to take; None takes all.

    Raises:
        ServingError: it does not answer.
        ConfigError: an arm is unknown, or engine settings differ between arms.
    """
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=30.0, headers=authorization())
        answer.raise_for_status()
        listed = answer.json()["data"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise ServingError(
            f"no endpoint at {url}: {error}; start one with `platform serve`, or correct --url"
        ) from None
    described = {card["id"]: (card.get("metadata") or {}).get("carryover") for card in listed}
    ours = {model: about for model, about in described.items() if about is not None}
    known = ours or {model: {} for model in described}
    for name in wanted or ():
        if name not in known:
            raise ConfigError(f"no arm {name!r} at {url}; it has: {', '.join(known)}")
    chosen = {name: known[name] for name in wanted or known}
    _check_pairs(chosen)
    return chosen


def choose_reference(arms: Mapping[str, dict[str, Any]], *, given: str | None = None) -> str | None:
    """The arm of speed-ups: the given one, the autoregressive one, or the first; None with one."""
    if len(arms) < 2:
        return None
    if given is not None:
        return given
    plain = [name for name, about in arms.items() if about and about.get("drafter") is None]
    return plain[0] if plain else next(iter(arms))


def choose_baseline(arms: Mapping[str, dict[str, Any]], *, given: str | None = None) -> str | None:
    """The arm of gains: the given one, `baseline`, or the first with a drafter.

    None without two arms that may have a drafter.
    """
    drafting = [name for name, about in arms.items() if about.get("drafter", "unknown") is not None]
    if len(drafting) < 2:
        return None
    if given is not None:
        return given
    return "baseline" if "baseline" in drafting else drafting[0]


def check_roles(arms: Mapping[str, Any], **roles: str | None) -> None:
    """Refuse a reference or baseline that is not measured.

    Raises:
        ConfigError: names the role.
    """
    for role, name in roles.items():
        if name is not None and name not in arms:
            raise ConfigError(
                f"the {role} {name!r} must be among the arms measured: {', '.join(arms)}"
            )


def notes_on_arms(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """In what arms differ besides the drafter's weights, one sentence each."""
    said = [
        f"{name} also differs in {', '.join(about['differences'])}, as its application allows; "
        "what is compared is that too"
        for name, about in arms.items()
        if about.get("differences")
    ]
    lengths = {name: about.get("num_speculative_tokens") for name, about in arms.items()}
    proposing = {name: length for name, length in lengths.items() if length is not None}
    if len(set(proposing.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in proposing.items())
        said.append(f"the arms propose different numbers of tokens a round: {listed}")
    return said


def equal_arms(arms: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Arms that are one of the arms before them once more, each after that one."""
    found = []
    first: dict[str, str] = {}
    for name, about in arms.items():
        if not about:
            continue  # of another server, and so unknown
        told = {key: value for key, value in about.items() if key != "control"}
        same = first.setdefault(json.dumps(told, sort_keys=True), name)
        if same != name:
            found.append((same, name))
    return found


def _check_pairs(arms: Mapping[str, dict[str, Any]]) -> None:
    """Refuse to compare arms whose engines differ in more than the drafter and what is allowed."""
    settings = {
        name: {"target": about["target"], "engine": _compared(about)}
        for name, about in arms.items()
        if about
    }
    first = next(iter(settings), None)
    for name, values in settings.items():
        if values != settings[first]:
            raise ConfigError(
                f"arms {first!r} and {name!r} differ in more than the drafter: "
                f"{json.dumps(settings[first])} against {json.dumps(values)}; serve them alike"
            )


def _compared(about: Mapping[str, Any]) -> dict[str, Any]:
    """Engine settings without those in which the application lets its arms differ."""
    engine = {**about["engine"], "extra": dict(about["engine"].get("extra") or {})}
    for name in about.get("allowed_differences") or ():
        section, _, key = name.rpartition(".")
        (engine["extra"] if section == "extra" else engine).pop(key, None)
    return engine
