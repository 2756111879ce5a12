"""Delta debugging: the smallest input that still fails."""

from __future__ import annotations

import torch

from bridge.verify.case import Case
from bridge.verify.shrink import Shrinker, compact, groups, select


def case(*inputs: torch.Tensor, grads: tuple[torch.Tensor, ...] = ()) -> Case:
    return Case(name="c", family="captured", dtype="float32", inputs=inputs, attrs={}, grad_outputs=grads)


def test_rows_and_columns_go_until_the_culprit_is_alone() -> None:
    x = torch.zeros(40, 33)
    x[17, 30] = 100.0
    found = Shrinker(lambda c: bool((c.inputs[0] > 50).any())).shrink(
        case(x, torch.ones(33), grads=(torch.ones(40, 33),))
    )
    assert [tuple(t.shape) for t in found.inputs] == [(1, 1), (1,)]
    assert tuple(found.grad_outputs[0].shape) == (1, 1)


def test_two_culprits_far_apart_stay_together() -> None:
    x = torch.zeros(64, 4)
    x[3, 0] = x[60, 0] = 9.0

    def fails(c: Case) -> bool:
        return int((c.inputs[0] == 9).sum()) == 2

    found = Shrinker(fails).shrink(case(x))
    assert tuple(found.inputs[0].shape) == (2, 1)


def test_axes_of_a_matmul_shrink_one_by_one() -> None:
    a, b = torch.ones(12, 20), torch.ones(20, 7)

    def fails(c: Case) -> bool:
        left, right = c.inputs
        return left.shape[1] == right.shape[0] and left.shape[1] >= 3

    found = Shrinker(fails).shrink(case(a, b, grads=(torch.ones(12, 7),)))
    assert [tuple(t.shape) for t in found.inputs] == [(1, 3), (3, 1)]
    assert tuple(found.grad_outputs[0].shape) == (1, 1)


def test_values_become_plain_where_they_do_not_matter() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3), torch.randn(3)

    def fails(c: Case) -> bool:
        return float(c.inputs[0].max()) > 0.5

    found = Shrinker(fails).shrink(case(x, weight))
    assert torch.equal(found.inputs[1], torch.ones_like(found.inputs[1]))
    assert torch.equal(found.inputs[0], torch.ones(1, 1))


def test_single_elements_are_cleared() -> None:
    x = torch.tensor([[0.3, 7.7, -2.2, 5.1]])

    def fails(c: Case) -> bool:
        return c.inputs[0].shape == (1, 4) and abs(float(c.inputs[0].flatten()[1]) - 7.7) < 1e-6

    found = Shrinker(fails).shrink(case(x))
    assert found.inputs[0].tolist() == torch.tensor([[0.0, 7.7, 0.0, 0.0]]).tolist()


def test_a_layout_that_matters_is_kept() -> None:
    wide = torch.arange(80.0).reshape(8, 10)
    grad = wide[:, :5]

    def fails(c: Case) -> bool:
        return c.grad_outputs[0].stride(0) == 10 and c.grad_outputs[0].shape[0] >= 2

    found = Shrinker(fails).shrink(case(torch.ones(8, 5), grads=(grad,)))
    assert found.grad_outputs[0].stride() == (10, 1) and found.grad_outputs[0].shape == (2, 1)
    expanded = torch.ones(1).expand(8, 5)
    kept = Shrinker(lambda c: c.grad_outputs[0].stride() == (0, 0)).shrink(
        case(torch.ones(8, 5), grads=(expanded,))
    )
    assert kept.grad_outputs[0].stride() == (0, 0)


def test_what_never_fails_smaller_comes_back_whole_and_within_the_budget() -> None:
    start = case(torch.randn(16, 16))
    shrinker = Shrinker(lambda c: False, budget=25)
    assert shrinker.shrink(start).inputs[0] is start.inputs[0]
    assert shrinker.tries == 25


def test_selection_and_groups() -> None:
    c = case(torch.arange(6).reshape(2, 3), torch.arange(3))
    picked = select(c, ((0, 1), (1, 0)), [0, 2])
    assert picked is not None and picked.inputs[1].tolist() == [0, 2]
    assert select(c, ((0, 0), (1, 0)), [2]) is None
    assert list(groups(c)) == [((0, 0),), ((0, 1), (1, 0))]
    view = torch.arange(12.0).reshape(3, 4)[1:, 1:3]
    copy = compact(view)
    assert torch.equal(copy, view) and copy.stride() == view.stride() and copy.storage_offset() == 0
