"""Where gradients lie in buckets, and how they, and weights, come there."""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from . import views
from .errors import InvalidArgument, Unsupported


class Slot:
    """A gradient's slot in its bucket. `view` is what users see as `.grad`: they, or `model.to(...)`, may point it to
    other memory (`.grad.data = ...`), so `home` is ours alone and tells where the slot really is."""

    __slots__ = ("address", "dtype", "home", "index", "name", "view")

    def __init__(self, home: Tensor, index: int, name: str) -> None:
        self.home, self.view, self.index, self.name = home, home.detach(), index, name
        self.address, self.dtype = home.data_ptr(), home.dtype

    def renewed(self) -> Tensor:
        """The view, made anew if somebody has pointed it to other memory."""
        if self.view.data_ptr() != self.address:
            self.view = self.home.detach()
        return self.view

    def spare(self) -> Tensor:
        """The view, before something else is written there. Whoever holds a gradient of a step before keeps its values,
        as with plain torch: theirs moves to memory of its own."""
        # this object's, and the argument of the call
        if sys.getrefcount(self.view) > 2 and self.view.data_ptr() == self.address:
            with torch.no_grad():
                self.view.data = self.view.clone()
        return self.renewed()

    def holds(self, gradient: Tensor | None) -> bool:
        """Whether a gradient is in its place already."""
        return gradient is self.view and self.view.data_ptr() == self.address

    def show(self, parameter: Tensor) -> None:
        """Makes what is in the bucket the parameter's gradient."""
        parameter.grad = self.renewed()

    def refuse(self, other: Tensor) -> None:
        """Raises if a gradient, or the parameter, is of another kind than the slot. Torch may forget the hooks of
        a parameter whose type changes: gradients would silently stay on this rank."""
        if other.layout is not torch.strided:
            raise Unsupported(
                f"the gradient of {self.name} is sparse ({other.layout}), which cannot be averaged in a bucket; try: "
                "nn.Embedding(..., sparse=False), or leave the parameter out of this optimizer and exchange it yourself"
            )
        if (dtype := views.type_of_gradient(other)) is not self.dtype:
            raise InvalidArgument(
                f"{self.name} was {self.dtype} when it was wrapped and is {dtype} now; try: convert the model first, "
                "then wrap it"
            )


def fill(views: list[Tensor], tensors: list[Tensor]) -> None:
    """Copies gradients or weights to where they are exchanged from, on torch's current stream."""
    torch._foreach_copy_(views, tensors)


def clear(view: Tensor) -> None:
    """Puts zeros where a gradient is exchanged from, on torch's current stream."""
    view.zero_()


def scale(views: list[Tensor], factor: float) -> None:
    """Multiplies gradients where they are, on torch's current stream."""
    if views:
        torch._foreach_mul_(views, factor)


def move(batch: Sequence[tuple[Tensor, Slot]]) -> list[int]:
    """Moves gradients into their slots, where they live from then on. Gives the numbers of those that are there."""
    ready, parameters, gradients, views = [], [], [], []
    for parameter, slot in batch:
        gradient = parameter.grad
        if gradient is None:  # another hook took it away; it counts as unused
            continue
        ready.append(slot.index)
        if gradient is not slot.view or slot.view.data_ptr() != slot.address:
            parameters.append(parameter)
            gradients.append(gradient)
            views.append(slot.spare())
    if not views:
        return ready
    if torch.is_grad_enabled():  # as in a backward with create_graph=True
        gradients = [gradient.detach() for gradient in gradients]
    try:
        fill(views, gradients)
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view
    except RuntimeError:  # looking first would cost as much as all the rest
        for parameter, slot in batch:
            if parameter.grad is not None:
                slot.refuse(parameter.grad)
        raise
    return ready
