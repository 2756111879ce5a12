"""`bridge env`: versions and devices, for a bug report."""

from __future__ import annotations

import json as jsonlib

import click


@click.command("env")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Print versions and devices, for a bug report."""
    from bridge.environment import describe_environment

    facts = describe_environment()
    if as_json:
        click.echo(jsonlib.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        click.echo(f"{name:<12} {value}")
