"""From what a backward pass starts, and how functions are applied, in all versions of torch that are allowed."""

from __future__ import annotations

import torch
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from gradcheck_dist.function_apply import application
from gradcheck_dist.probes.backward.roots import roots_of


def test_an_edge_stands_for_the_tensor_that_was_let_go() -> None:
    output = torch.ones(2, 3, requires_grad=True).chunk(2, dim=1)[1]
    for given in (get_gradient_edge(output), [get_gradient_edge(output)], output, (output, None)):
        (root,) = roots_of(given)
        assert (root.grad_fn, root.output_nr, root.numel()) == (output.grad_fn, 1, 2)


def test_edges_from_which_a_put_off_part_starts_are_no_roots() -> None:
    weight, given = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    edge = get_gradient_edge(weight * given)
    assert roots_of([edge], [given])
    assert roots_of([edge], given)
    assert not roots_of([edge], [get_gradient_edge(weight)])


def test_functions_are_applied_by_a_class_method_in_python_and_by_one_in_c() -> None:
    class Doubled(Function):
        @staticmethod
        def forward(ctx: object, given: torch.Tensor) -> torch.Tensor:
            return given * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    given = torch.ones(2, requires_grad=True)
    result = application(Function.__dict__["apply"])(Doubled, given)
    assert result.tolist() == [2, 2] and type(result.grad_fn).__name__ == "DoubledBackward"
    in_c = dict.__dict__["fromkeys"]
    assert not hasattr(in_c, "__func__")
    assert application(in_c)(dict, "ab", 1) == {"a": 1, "b": 1}
