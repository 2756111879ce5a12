"""Damage anything in a capture: the reader answers with its own error, or reads what is still right."""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge.capture.select import Selection
from bridge.capture.store import load_capture
from bridge.capture.tracer import Tracer
from bridge.errors import CaptureError

FILES = ("manifest.json", "rank_00000/calls.jsonl", "rank_00000/contents.jsonl", "rank_00000/blobs.jsonl",
         "rank_00000/tensors-00000.safetensors", "rank_00000/rank.json")  # fmt: skip
_GIGABYTE = 1 << 30


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fuzz") / "capture"
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU())
    tracer = Tracer(model, out=out, step=3, selection=Selection(patterns=("*",)))
    with tracer:
        model(torch.randn(2, 4).t().contiguous().t()).sum().backward()
    return tracer.finish()


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    """An absurd size must be refused, not tried: allocating it fails here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * _GIGABYTE, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def use(path: Path) -> None:
    """Read everything; only our own errors may come out."""
    try:
        capture = load_capture(path)
        assert isinstance(capture.problems, tuple)
        for call in capture.calls:
            capture.tensors(call)
            for record in call.inputs:
                if record.blob:
                    capture.tensor(record)
    except CaptureError as error:
        assert len(str(error).splitlines()) == 1
        assert len(str(error)) < 2000


def forget_hashes(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    for rank in manifest["ranks"]:
        rank["files"], rank["shards"] = {}, {}
    (path / "manifest.json").write_text(json.dumps(manifest))


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One plausible damage."""
    if not data:
        return b"\x00"
    at = rng.randrange(len(data))
    kind = rng.randrange(7)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + data[at : at + 200] * 3 + data[at + 200 :]
    if kind == 3:
        return data[:at] + data[at + rng.randrange(1, 300) :]
    if kind == 4:
        digits = [i for i, byte in enumerate(data[:4000]) if 48 <= byte <= 57] or [at]
        where = rng.choice(digits)
        number = rng.choice([b"99999999999999999999", b"-1", b"1e308", b"9223372036854775807", b"0", b"null"])
        return data[:where] + number + data[where + 1 :]
    if kind == 5:
        return data + rng.randbytes(50)
    return data[:at] + rng.choice([b'"', b"{", b"[", b"\xff\xfe", b"\n", b"../../", b"\x80\x04."]) + data[at:]


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(FILES), st.integers(0, 2**32), st.booleans(), st.integers(1, 3))
def test_random_damage(template: Path, name: str, seed: int, hashes: bool, times: int) -> None:
    rng = random.Random(seed)
    path = template.parent / "damaged"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(template, path)
    if not hashes:
        forget_hashes(path)
    for _ in range(times):
        data = (path / name).read_bytes()
        (path / name).write_bytes(mutate(data, rng))
    use(path)


VALUES: list[Any] = [
    None,
    -1,
    2**62,
    2**64,
    1e300,
    "",
    "../../x",
    [],
    {},
    [[]],
    True,
    "x" * 10_000,
    [2**40] * 9,
    [0] * 9,
]


def spots(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from spots(item, (*path, key))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(FILES[:4]), st.integers(0, 2**32), st.sampled_from(range(len(VALUES))))
def test_every_field_with_a_value_it_should_not_have(
    template: Path, name: str, seed: int, value: int
) -> None:
    rng = random.Random(seed)
    path = template.parent / "forged"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(template, path)
    forget_hashes(path)
    lines = (path / name).read_text().splitlines() if name.endswith("jsonl") else [(path / name).read_text()]
    at = rng.randrange(len(lines))
    document = json.loads(lines[at])
    spot = rng.choice(list(spots(document)))
    inner = document
    for key in spot[:-1]:
        inner = inner[key]
    inner[spot[-1]] = VALUES[value]
    lines[at] = json.dumps(document)
    (path / name).write_text("\n".join(lines) + "\n")
    use(path)


def test_the_template_itself_is_whole(template: Path) -> None:
    capture = load_capture(template)
    assert capture.complete
    capture.verify_files()
    use(template)
