"""Interpret compose files as far as ours need it, to run a service without an engine."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tests.support import ROOT

DOCKER = ROOT / "docker"
_VARIABLE = re.compile(
    # The text may hold one variable more, with a plain text of its own.
    r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+)(?:(?P<kind>:-|:\+)(?P<text>(?:\$\{[^}]*\}|[^}])*))?\})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service; its paths are those inside the container."""

    name: str
    profiles: tuple[str, ...]
    command: tuple[str, ...]
    environment: dict[str, str]
    mounts: dict[str, str]  # container's path -> host's, as written
    settings: Mapping[str, Any]  # all of it, variables replaced


def services(environ: Mapping[str, str], file: str = "compose.yaml") -> dict[str, Service]:
    """Return the services of a compose file, with the variables of `environ` put in."""
    document = _replaced(yaml.safe_load((DOCKER / file).read_text()), environ)
    secrets = {
        f"/run/secrets/{name}": secret["file"]
        for name, secret in document.get("secrets", {}).items()
    }
    found = {}
    for name, settings in document["services"].items():
        command = settings.get("command", [])
        volumes = (volume.split(":")[:2] for volume in settings.get("volumes", []))
        found[name] = Service(
            name=name,
            profiles=tuple(settings.get("profiles", ())),
            command=tuple(shlex.split(command) if isinstance(command, str) else command),
            environment=settings.get("environment", {}),
            mounts={inside: outside for outside, inside in volumes} | secrets,
            settings=settings,
        )
    return found


def variables(file: str = "compose.yaml") -> set[str]:
    """Return the names of all variables that a compose file reads."""
    return set(re.findall(r"\$\{(\w+)", (DOCKER / file).read_text()))


def _replaced(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(each, environ) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, environ) for each in value]
    if not isinstance(value, str):
        return value

    def put(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        given = environ.get(match["name"], "")
        if match["kind"] == ":+":
            return match["text"] if given else ""
        return given or _VARIABLE.sub(put, match["text"] or "")

    return _VARIABLE.sub(put, value)
