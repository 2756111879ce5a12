"""train.toml: what is read, and what each mistake says."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.config import BridgeConfig, load_config, parse_size
from bridge.errors import ConfigError

GOOD = """
[train]
module = "llama3"
config = "llama3_debugmodel"
[train.set]
"training.steps" = 100
"override.imports" = ["a.b.c"]
[capture]
step = 100
ops = ["offset_rmsnorm", "layers.*.attention/*"]
max_bytes = "8 GiB"
replace = {"torch.nn.RMSNorm" = "rms_norm"}
[verify]
fudge_factor = 2.5
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "train.toml"
    path.write_text(text, encoding="utf-8")
    return path


def message(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_reads_every_section(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert config.train.module == "llama3"
    assert config.train.set == {"training.steps": 100, "override.imports": ["a.b.c"]}
    assert config.capture.ops == ("offset_rmsnorm", "layers.*.attention/*")
    assert config.capture.budget_bytes == 8 * 1024**3
    assert config.capture.replace == {"torch.nn.RMSNorm": "rms_norm"}
    assert config.verify.fudge_factor == 2.5
    assert config.path == str(tmp_path / "train.toml")


def test_an_empty_file_is_a_config(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == BridgeConfig(path=str(tmp_path / "train.toml"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[capture]\nstp = 3", ["'capture.stp'", "did you mean step"]),
        ("[captur]\nstep = 3", ["'captur'", "capture"]),
        ("[capture]\nstep = 1.5", ["capture.step", "float"]),
        ("[capture]\nops = 'a'", ["capture.ops", "array"]),
        ("capture = 3", ["capture must be a table", "int"]),
        ("[train]\nmodule = 'llama3'", ["train.module needs train.config"]),
        ("[train]\nconfig = 'x'", ["train.config needs train.module"]),
        ("[train]\nmodule = 'a'\nconfig = 'b'\nscript = 'c.py'", ["module and script", "exactly one"]),
        ("[train]\nscript = 'c.py'\n[train.set]\n'a.b' = 1", ["[train.set] needs train.module"]),
        ("[capture]\nmax_bytes = 'lots'", ["capture.max_bytes", "8 GiB", "'lots'"]),
        ("[verify]\nfudge_factor = -1", ["verify.fudge_factor", "at least 0", "-1"]),
        ("[capture]\ntensors = 'some'", ["capture.tensors", "some"]),
        ("[train\n", ["not valid TOML"]),
        ("[train]\nmodule='a'\nconfig='b'\n[training]\nsteps=3", ["'training'", "0.2.x", "job file"]),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    said = message(tmp_path, text)
    for part in ["train.toml", *parts]:
        assert part in said


def test_a_missing_file_lists_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(ConfigError, match=r"no config file .*nope.toml.*has train\.toml"):
        load_config(tmp_path / "nope.toml")


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(path)


def test_a_job_file_of_torchtitan_02_is_recognised(tmp_path: Path) -> None:
    path = write(tmp_path, "[job]\nx = 1\n[model]\nname = 'llama3'\n[training]\nsteps = 10\n")
    assert load_config(path).train.job == str(path)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1 KiB", 1024),
        ("1kb", 1000),
        ("1.5 GiB", 3 * 512 * 1024**2),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "0", 0, -5, "nan"])
def test_sizes_that_are_none(text: str | int) -> None:
    with pytest.raises(ConfigError, match="positive size"):
        parse_size(text)


def test_files_that_the_config_names_lie_beside_it(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[job]\n", encoding="utf-8")
    assert load_config(write(tmp_path, "[train]\njob = 'job.toml'")).train.job == str(tmp_path / "job.toml")
    assert load_config(write(tmp_path, "[train]\nscript = 'train.py'")).train.script == "train.py"
