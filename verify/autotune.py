"""Autotuned kernels: every configuration judged alone, since tuning picks by speed and differs by machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bridge.verify.case import Case
from bridge.verify.execute import Result, run, run_target
from bridge.verify.interpreter import repaired
from bridge.verify.launches import watch
from bridge.verify.spec import KernelSpec

#: Configurations of one kernel that are tried; each costs a compilation.
_MOST = 24


@contextmanager
def pinned(tuner: Any, config: Any) -> Iterator[None]:
    """`tuner` with this configuration only, so that its next run benchmarks nothing and uses it."""
    configs = tuner.configs
    tuner.configs = [config]
    try:
        yield
    finally:
        tuner.configs = configs


def name_of(tuner: Any) -> str:
    """Name of the kernel under an autotuner and other wrappers."""
    inner = tuner
    while hasattr(inner, "fn"):
        inner = inner.fn
    return str(getattr(inner, "__name__", "kernel"))


def tuners_of(spec: KernelSpec, case: Case) -> list[Any]:
    """Autotuners with a choice that the target runs on this case, in first-seen order."""
    with repaired(), watch() as seen:
        run(spec.target, spec, case)
    return seen.tuners


def each_config(spec: KernelSpec, case: Case) -> Iterator[tuple[str, Result | str | Exception]]:
    """The target on one case, once per configuration of each autotuner it launches.

    Yields:
        The configuration in words, and what came back: a result, a complaint about what was returned, or
        what was raised.
    """
    for tuner in tuners_of(spec, case):
        for config in list(tuner.configs)[:_MOST]:
            words = f"{name_of(tuner)} with {config}"
            with pinned(tuner, config):
                try:
                    yield words, run_target(spec, case)
                except Exception as error:  # what a configuration raises is that configuration's finding
                    yield words, error
