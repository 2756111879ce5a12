"""What one captured step consists of: calls, the tensors they touched, and the manifest.

These records are the whole interface between a capture and everything that reads it. They are
plain data (msgspec structs, frozen, keyword-only) and import no torch, so that a report or an
inspection needs none. `store` is the only reader and writer of their form on disk.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

#: 1: first version.
SCHEMA_VERSION = 1

Phase = Literal["forward", "recompute", "backward", "optimizer", "other"]
Kind = Literal["op", "module", "launch"]


class Digest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Statistics and hash of one tensor's contents; the sums skip non-finite elements.

    Complex tensors are digested as pairs of reals, so `count` is twice their number of elements.
    The hash runs over the elements in the order they have in memory, gaps left out. So it does not see
    strides, with one exception that is needed to digest `x` and `x.t()` once: a tensor whose dimensions
    lie permuted in memory, or repeated (stride 0), hashes like its base. Two hashes say something about
    equality when `layout.memory_order` of the two records agrees.
    """

    count: int
    sum: float
    abs_sum: float
    sq_sum: float
    min: float | None  #: None when no element is finite
    max: float | None
    nan: int
    pos_inf: int
    neg_inf: int
    hash: str  #: 16 hex digits; depends on every bit and its position, not on strides


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One tensor as one call saw it."""

    name: str  #: argument path: "0", "1.2" (list argument), "eps", "weight"; outputs "0", "1", ...
    dtype: str  #: torch's name without "torch.": "bfloat16"
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    offset: int = 0  #: storage offset, in elements
    device: str = "cpu"
    requires_grad: bool = False
    storage: int = -1  #: number of the storage within the step; equal numbers share memory
    epoch: int = 0  #: how often that storage had been written when this call saw it
    digest: Digest | None = None
    blob: str | None = None  #: content hash of the stored bytes; None: digest only
    producer: int | None = None  #: index of the call that wrote these contents; None: from outside the step
    subclass: str | None = None  #: wrapper class name: "DTensor", ...
    mesh: str | None = None  #: DTensor: mesh, e.g. "(dp=2, tp=4)"
    placements: tuple[str, ...] = ()  #: DTensor: "Shard(0)", "Replicate()", ...
    global_shape: tuple[int, ...] | None = None  #: DTensor: logical shape; `shape` is the local one
    content: int = (
        -1
    )  #: on disk: line of contents.jsonl that holds digest and blob; equal numbers, equal bytes


class Call(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One execution seen in a captured step."""

    index: int  #: position in execution order (module calls: position of their first event)
    key: str  #: stable name, "layers.0.attention.wq/op_0_mm"; unique within step and rank
    kind: Kind
    op: str  #: "aten::mm.default" | module class "OffsetRMSNorm" | Triton kernel name
    step: int
    rank: int = 0
    phase: Phase = "forward"
    microbatch: int = 0
    module: str = ""  #: FQN of the owning module; "" is the root
    module_class: str = ""
    inputs: tuple[TensorRecord, ...] = ()
    outputs: tuple[TensorRecord, ...] = ()
    params: tuple[TensorRecord, ...] = ()  #: module calls: parameters and buffers used, local names
    grad_outputs: tuple[TensorRecord, ...] = ()  #: module calls: upstream gradients, named as the outputs
    grad_inputs: tuple[TensorRecord, ...] = ()  #: module calls: gradients made, named as inputs and params
    mutated: tuple[str, ...] = ()  #: names of inputs that the call wrote
    attrs: dict[str, Any] = {}  #: scalar arguments by name; module calls: also plain scalar attributes
    parent: int | None = None  #: index of the call that this one ran inside
    forward: int | None = None  #: backward and recompute: index of the forward call it belongs to
    source: str | None = None  #: "model.py:123 in forward"
    flags: dict[str, Any] = {}  #: autocast, precision and RNG state where they matter, grid, constexprs
    replayable: bool = True
    note: str | None = None  #: why something is missing, in words


class ShardFile(msgspec.Struct, frozen=True, kw_only=True):
    """A whole shard: its header names each blob by the hash of its bytes, so the header stands for them."""

    nbytes: int  #: size of the file
    header: str  #: sha256 of the header, its eight bytes of length and its padding included


class RankFiles(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank wrote."""

    rank: int
    calls: int
    files: dict[str, str]  #: path relative to the capture -> sha256 of the file
    shards: dict[str, ShardFile] = {}  #: likewise; older captures list shards among the files


#: Code of a problem that a full disk or quota made.
DISK_FULL = "disk-full"


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was selected but not stored."""

    key: str
    tensor: str
    bytes: int
    reason: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`; rank 0 writes it, `complete` is set last."""

    schema_version: int = SCHEMA_VERSION
    complete: bool = False
    tool: str = ""
    step: int = 0  #: the step whose tensors are here
    steps: tuple[int, ...] = ()  #: every step with calls
    created: str = ""
    command: tuple[str, ...] = ()
    versions: dict[str, str] = {}  #: torch, triton, torchtitan, python, ...
    device: str = ""
    seed: int | None = None
    config: dict[str, Any] = {}
    config_path: str | None = None
    flags: dict[str, Any] = {}  #: deterministic, tf32, autocast, ... as found in the run
    world_size: int = 1
    ranks: tuple[RankFiles, ...] = ()
    metrics: dict[str, float | None] = {}  #: "loss", "grad_norm" of the captured step
    selection: dict[str, Any] = {}
    budget_bytes: int | None = None
    stored_bytes: int = 0
    forecast_bytes: int | None = None  #: what storing all that was selected was expected to take
    dropped: tuple[Dropped, ...] = ()
    problems: tuple[str, ...] = ()  #: what went wrong inside the tool; the capture is partial then
    problem_codes: dict[str, str] = {}  #: a problem -> its code (DISK_FULL), where a program acts on it
