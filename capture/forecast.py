"""How much the tensors of a step will take, said when its forward pass is over. Imports no torch.

What a forward pass shows comes back in the backward pass as gradients of the same sizes. The rest depends
on the parameters alone.
"""

from __future__ import annotations

#: Copies of all parameters that a step has after its forward pass: gradients, clipped ones, and for Adam both
#: moments before and after, the parameters after, and what is read of the gradients once more.
_AFTER_FORWARD = 8
#: Of these, and those that the forward pass reads, the ones that any optimizer has.
_LEAST = 3


def at_least(parameters: int) -> int:
    """Bytes that storing every tensor takes, whatever the model does.

    Args:
        parameters: Bytes of the parameters on this rank.
    """
    return _LEAST * parameters


def expected(forward: int, *, parameters: int | None) -> int:
    """Bytes that the whole step will have stored, more where several microbatches are accumulated.

    Args:
        forward: Bytes stored until the backward pass began.
        parameters: Bytes of the parameters on this rank; None where only some calls are stored: then
            no more than their gradients will come.
    """
    if parameters is None:
        return 2 * forward
    return forward + max(forward - parameters, 0) + _AFTER_FORWARD * parameters
