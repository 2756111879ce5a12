"""The command line: a lazy group of verbs and the one place where exit codes are decided.

A verb is one module of this package with one click command named like the module. It calls one
library function and prints. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from bridge import errors
from bridge._version import __version__
from bridge.cli._signals import ending_signals_interrupt

#: verb -> one line for `bridge --help`, so that help imports no verb.
VERBS = {
    "capture": "Run training and store the tensors of one step.",
    "verify": "Judge a kernel: FP64 golden, eager reference, kernel target.",
    "ab": "Run baseline and candidate, diff them, verify the suspects.",
    "diff": "Compare two captures: where they part, and what was born there.",
    "scan": "Judge every captured op of one run against FP64.",
    "report": "Render a verdict.json as HTML, text, Markdown, JUnit XML or JSON.",
    "inspect": "Say what a capture folder holds and what it lacks.",
    "repro": "Shrink a failing input to the smallest script that still fails.",
    "recheck": "Judge a stored verdict again, under other constants or anew.",
    "env": "Print versions and devices, for a bug report.",
}

EPILOG = """\b
Exit codes
  0    every verdict PASS or PASS WITH LIMITATIONS; no divergence
  1    a FAIL; a divergence
  2    usage, bad file, bad config
  3    nothing judged, or INCONCLUSIVE
  4    internal error (BRIDGE_DEBUG=1 shows the traceback)
  130  interrupted"""


class VerbGroup(click.Group):
    """Imports a verb's module when the verb is used, not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = importlib.import_module(f"bridge.cli.{name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            hint = errors.near_misses(args[0], VERBS)
            raise errors.UsageError(f"no such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"numerics-bridge {__version__}")
        ctx.exit()


@click.command(cls=VerbGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Capture a diverging training step; judge the handwritten kernel in it."""
    if os.environ.get("NO_COLOR"):
        ctx.color = False


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nothing else decides one."""
    _open_streams()
    try:
        with ending_signals_interrupt():
            result: Any = cli.main(args=argv, prog_name="bridge", standalone_mode=False)
        return result if isinstance(result, int) else errors.EXIT_OK
    except errors.BridgeError as error:
        return _say(error, error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return errors.EXIT_USAGE
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = f" (see `{context.command_path} --help`)" if context is not None else ""
        return _say(error, errors.EXIT_USAGE, text=f"{error.format_message()}{where}")
    except (KeyboardInterrupt, click.Abort):
        click.echo("bridge: interrupted", err=True)
        return errors.EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # click answers a broken pipe by wrapping stdout and raising SystemExit.
        if isinstance(error, SystemExit) and type(sys.stdout).__name__ != "_PacifyFlushWrapper":
            raise
        # The reader of our output has gone (`bridge inspect | head`): nothing left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.EXIT_OK
    except Exception as error:
        if errors.no_space(error):
            what = f"{error.filename or 'the output'} cannot be written: {error.strerror}"
            return _say(error, errors.EXIT_USAGE, text=f"{what}; free some space, or write elsewhere")
        what = f"internal error: {type(error).__name__}: {error}"
        text = f"{what}. Please report it, with what BRIDGE_DEBUG=1 shows."
        return _say(error, errors.EXIT_INTERNAL, text=text)


def _open_streams() -> None:
    """Give a process that was started without standard streams the null device in their place.

    Else the next file or pipe that is opened gets their number, and what is printed ends up in it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one; children are to have it too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))


def _say(error: BaseException, code: int, *, text: str | None = None) -> int:
    if os.environ.get("BRIDGE_DEBUG"):
        traceback.print_exception(error)
    line = " ".join((text or str(error)).split())
    click.echo(f"bridge: error: {line}", err=True)
    return code


def main() -> int:
    """Console entry point."""
    return run()
