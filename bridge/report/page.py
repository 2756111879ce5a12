"""Putting a page together: templates, our own assets, packed data, the plotly bundle."""

from __future__ import annotations

import base64
import functools
import gzip
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from bridge._version import __version__
from bridge.report.numbers import percent, plural, short
from bridge.report.palette import ROLES, SYMBOLS, css_variables, dark_of_light

#: Level 9 saves the bundle 1 % and takes twice as long; a table of 100,000 calls takes four times as long.
_LEVEL = 6


def render_page(template: str, *, data: Any, **values: Any) -> str:
    """Return a self-contained page.

    Args:
        template: Name under templates/.
        data: What the page's script reads, as plain data; it travels gzipped, in base64.
        values: What the template reads; every string among it is escaped.
    """
    # Compressing lets go of the interpreter: the bundle and the data are packed side by side.
    with ThreadPoolExecutor(1) as pool:
        bundle = pool.submit(_plotly)
        packed = pack(msgspec.json.encode(data, order="deterministic"))
    css = {theme: Markup(text) for theme, text in css_variables().items()}
    return (
        _environment()
        .get_template(template)
        .render(
            css=css,
            palette=script_json(dark_of_light()),
            data=packed,
            plotly=bundle.result(),
            **values,
        )
    )


def prepare() -> None:
    """Do now what every page needs and no page differs in: half of the time of a small one."""
    _environment()
    _plotly()


def script_json(value: Any) -> Markup:
    """Return JSON that cannot end or confuse the script element it stands in."""
    text = msgspec.json.encode(value, order="deterministic").decode()
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def pack(content: bytes) -> Markup:
    """Return bytes gzipped and in base64; equal bytes give equal text."""
    return Markup(base64.b64encode(gzip.compress(content, _LEVEL, mtime=0)).decode("ascii"))


@functools.cache
def _plotly() -> Markup:
    # The submodule, not `plotly.offline`, keeps the import at a few milliseconds.
    from plotly.offline import get_plotlyjs

    return pack(get_plotlyjs().encode())


def _asset(name: str) -> Markup:
    return Markup(resources.files("bridge.report").joinpath("assets", name).read_text("utf-8"))


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bridge.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shape"] = lambda shape: "x".join(map(str, shape)) or "scalar"
    environment.globals.update(
        asset=_asset,
        percent=percent,
        plural=plural,
        roles=ROLES,
        short=short,
        symbols=SYMBOLS,
        version=__version__,
    )
    return environment
