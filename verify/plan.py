"""Which inputs to judge on, beside captured ones: declared shapes, edges, adversarial values, layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bridge.errors import KernelError, SpecError
from bridge.verify.case import Case
from bridge.verify.execute import copy_with_layout, run_target, split
from bridge.verify.layouts import GRAD_LAYOUTS, INPUT_LAYOUTS
from bridge.verify.options import Options
from bridge.verify.probes import probe_cases
from bridge.verify.raised import broke_gpu, refusal
from bridge.verify.spec import KernelSpec
from bridge.verify.sweeps import SWEEPS, Sweep, applies, changed, roles

#: Families whose verdict is about the kernel's declared support; the verifier chose all others.
OWN_FAMILIES = ("captured", "declared")
#: Extent of the axes that an edge shape does not move.
_SMALL = 64
#: A tile edge is tried on an axis when it is at most this many times the longest declared extent.
_REACH = 4
#: Size of the shape that adversarial values are tried on: enough for statistics, cheap to interpret.
_BASE_ELEMENTS = 1500


def plan_cases(
    spec: KernelSpec,
    *,
    dtypes: Sequence[str] | None = None,
    seed: int = 0,
    device: str = "cpu",
    options: Options | None = None,
    tiles: tuple[int, ...] | None = None,
) -> list[Case]:
    """All cases that need no capture, in a fixed order: those of declared shapes first.

    Args:
        dtypes: names out of `spec.dtypes`; all of them when None.
        seed: of every draw; equal seeds give equal bits.
        device: where the tensors live.
        options: `sweeps=False` leaves only the declared shapes.
        tiles: extents seen in launches; None: the target runs on the first dtype's declared shapes.

    Raises:
        SpecError: a dtype is not declared, or `sample` does not fit its contract.
    """
    options = options or Options(seed=seed)
    chosen = tuple(dtypes) if dtypes is not None else spec.dtypes
    for name in chosen:
        if name not in spec.dtypes:
            raise SpecError(
                f"dtype must be one that {spec.name} declares ({', '.join(spec.dtypes)}), got {name!r}"
            )
    maker = _Maker(spec=spec, seed=seed, device=device)
    cases: list[Case] = []
    for dtype in chosen:
        declared = [maker.case(shape, dtype, "declared") for shape in spec.shapes]
        declared[0] = replace(declared[0], configs=True)
        cases += declared
    if options.sweeps:
        tiles = observe_tiles(spec, cases[: len(spec.shapes)]) if tiles is None else tiles
        for dtype in chosen:
            cases += _added(maker, spec, dtype, tiles, options, full=dtype == chosen[0])
    return cases


def _added(
    maker: _Maker, spec: KernelSpec, dtype: str, tiles: tuple[int, ...], options: Options, *, full: bool
) -> Iterator[Case]:
    for shape in _edge_shapes(spec, tiles, options, full=full):
        yield from maker.optional(shape, dtype, "smallest" if max(shape) == 1 else "tile edge")
    for base in _bases(spec, tiles, options):
        start = next(iter(maker.optional(base, dtype, "adversarial")), None)
        if start is None:
            continue
        for sweep in SWEEPS:
            if applies(sweep, spec.kind):
                yield from maker.swept(start, sweep)
        yield from probe_cases(spec, start, maker.generator(start.name, "probes"), maker.drawn(dtype))
        if full:  # addresses do not depend on the dtype
            yield from maker.laid_out(start)
        for name, make in spec.adversarial.items():
            yield from maker.optional(base, dtype, "adversarial", label=name, sample=make)


def observe_tiles(spec: KernelSpec, declared: Sequence[Case]) -> tuple[int, ...]:
    """Tile extents seen in the constexprs of the launches over the declared shapes.

    Raises:
        KernelError: the target broke the GPU's context, so this process cannot go on.
    """
    seen: set[int] = set()
    for case in declared:
        try:
            result = run_target(spec, case)
        except Exception as error:
            if broke_gpu(error):
                raise KernelError(refusal(spec, case, "target", error)) from error
            continue
        if not isinstance(result, str):
            seen.update(result.tiles)
    return tuple(sorted(seen))


def _edge_shapes(
    spec: KernelSpec, tiles: tuple[int, ...], options: Options, *, full: bool
) -> list[tuple[int, ...]]:
    """Smallest shape, each axis of one, then each axis just above, below and at each observed tile.

    One axis moves at a time, the others stay small: edges are about masks, not about size. `full` is
    for the first dtype; masks do not depend on the dtype, so later ones get the sizes above only.
    """
    rank = len(spec.shapes[0])
    # Of a spec that declares several ranks, the first shape's.
    alike = [shape for shape in spec.shapes if len(shape) == rank]
    base = min(alike, key=lambda s: (abs(_numel(s) - 1024), s))
    longest = [max(shape[axis] for shape in alike) for axis in range(rank)]
    small = tuple(min(n, _SMALL) for n in base)
    shapes: list[tuple[int, ...]] = [(1,) * rank]
    for axis in range(rank):
        shapes.append(tuple(1 if i == axis else n for i, n in enumerate(small)))
        # Axes that are equal in every declared shape hide a mix-up of the two.
        shapes.append(tuple(n + 3 if i == axis else n for i, n in enumerate(small)))
    reach = [tuple(t for t in tiles if t <= max(_REACH * n, 2 * min(tiles))) for n in longest]
    for tile in sorted({t for r in reach for t in r}):
        shapes.append(tuple(_ragged(n, tile, tile in reach[i]) for i, n in enumerate(small)))
    for shift in (1, -1, 0) if full else (1,):
        for axis in range(rank):
            for tile in reach[axis]:
                shapes.append(tuple(tile + shift if i == axis else n for i, n in enumerate(small)))
    fresh = [s for s in dict.fromkeys(shapes) if s not in spec.shapes and min(s) >= 1]
    return [s for s in fresh if _numel(s) <= options.budget_elements][: options.max_edges]


def _ragged(size: int, tile: int, reachable: bool) -> int:
    """Just past two tiles where that is not far beyond declared sizes."""
    return min(2 * tile + 1, 129) if reachable and tile <= 64 else size


def _bases(spec: KernelSpec, tiles: tuple[int, ...], options: Options) -> list[tuple[int, ...]]:
    """Shapes that the adversarial values are tried on: one with ragged edges, one with many rows."""
    small = [s for s in spec.shapes if _numel(s) <= 1 << 15] or [min(spec.shapes, key=_numel)]
    ragged = [s for s in small if s[-1] & (s[-1] - 1) and min(s) > 1]
    first = min(ragged or small, key=lambda s: (abs(_numel(s) - _BASE_ELEMENTS), s))
    if not ragged and tiles:
        first = tuple(n + 1 if i == len(first) - 1 else n for i, n in enumerate(first))
    return [first]


def _numel(shape: Iterable[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    spec: KernelSpec
    seed: int
    device: str

    def generator(self, *salt: Any) -> torch.Generator:
        """A generator that depends on the seed and the case only, not on what was drawn before."""
        mixed = self.seed
        for part in salt:
            for byte in str(part).encode():
                mixed = (mixed * 1000003 + byte) % (1 << 61)
        return torch.Generator(device=self.device).manual_seed(mixed)

    def case(
        self, shape: tuple[int, ...], dtype: str, family: str, *, label: str = "", sample: Any = None
    ) -> Case:
        spec = self.spec
        generator = self.generator(shape, dtype, label)
        made = (sample or spec.sample)(shape, getattr(torch, dtype), generator, self.device)
        inputs = split(made, len(spec.inputs))
        if isinstance(inputs, str):
            raise SpecError(
                f"`sample` of {spec.name} for shape {shape} {inputs.replace('outputs', 'inputs')}"
            )
        inputs = tuple(t.detach() for t in inputs)
        kinds = {str(t.dtype).removeprefix("torch.") for t in inputs if t.is_floating_point()}
        if kinds and dtype not in kinds:
            raise SpecError(
                f"`sample` of {spec.name} must draw a tensor of the dtype that it is given, {dtype}, "
                f"got {', '.join(sorted(kinds))}"
            )
        name = f"{shape} {dtype}" + (f", {label}" if label else "")
        return Case(
            name=name,
            family=family,
            dtype=dtype,
            inputs=inputs,
            attrs=dict(spec.attrs),
            grad_outputs=self.upstream(inputs, generator),
        )

    def optional(
        self, shape: tuple[int, ...], dtype: str, family: str, *, label: str = "", sample: Any = None
    ) -> Iterator[Case]:
        """The case, or nothing where `sample` or the reference refuse a shape that nobody declared."""
        try:
            yield self.case(shape, dtype, family, label=label, sample=sample)
        except Exception:
            return

    def drawn(self, dtype: str) -> Callable[[tuple[int, ...]], Case | None]:
        """Draws a case of any shape, for the probes; None where it is refused."""
        return lambda shape: next(iter(self.optional(shape, dtype, "adversarial")), None)

    def upstream(
        self, inputs: tuple[torch.Tensor, ...], generator: torch.Generator
    ) -> tuple[torch.Tensor, ...]:
        """One random gradient per output, in the output's dtype; all three implementations get it."""
        if not self.spec.grads:
            return ()
        with torch.no_grad():
            values = tuple(copy_with_layout(t) for t in inputs)
            outputs = split(self.spec.reference(*values, **self.spec.attrs), len(self.spec.outputs))
        if isinstance(outputs, str):
            raise SpecError(f"the reference of {self.spec.name} {outputs}")
        return tuple(
            torch.randn(o.shape, generator=generator, device=self.device).to(
                o.dtype if o.is_floating_point() else torch.float32
            )
            for o in outputs
        )

    def swept(self, start: Case, sweep: Sweep) -> Iterator[Case]:
        generator = self.generator(start.name, sweep.name)
        parts = roles(start.inputs)
        if sweep.on == "grad_output":
            if not start.grad_outputs:
                return
            inputs = start.inputs
            grads = tuple(changed(g, sweep, generator) for g in start.grad_outputs)
        else:
            if sweep.on not in parts:
                return
            inputs = tuple(
                changed(t, sweep, generator) if role == sweep.on else t
                for t, role in zip(start.inputs, parts, strict=True)
            )
            grads = start.grad_outputs
        yield self._varied(start, sweep.name, "adversarial", inputs, grads)

    def laid_out(self, start: Case) -> Iterator[Case]:
        for layout in INPUT_LAYOUTS:
            inputs = tuple(layout.make(t) for t in start.inputs)
            yield self._varied(start, layout.name, "layout", inputs, start.grad_outputs)
        if start.grad_outputs:
            for layout in GRAD_LAYOUTS:
                grads = tuple(layout.make(g) for g in start.grad_outputs)
                yield self._varied(start, layout.name, "layout", start.inputs, grads)

    def _varied(
        self,
        start: Case,
        label: str,
        family: str,
        inputs: tuple[torch.Tensor, ...],
        grads: tuple[torch.Tensor, ...],
    ) -> Case:
        return Case(
            name=f"{start.name}, {label}",
            family=family,
            dtype=start.dtype,
            inputs=inputs,
            attrs=start.attrs,
            grad_outputs=grads,
        )
