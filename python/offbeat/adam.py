"""Adam's step with a frozen second moment, for algorithms that exchange momentum in few bits.

Until the freeze the optimizer makes its own step. From then on `exp_avg` and `step` go on under their own names and
`exp_avg_sq` stays as it is:

    v̂ = v / (1 - β2^T)                      T: the parameter's steps at the freeze
    m = β1·m + (1 - β1)·g
    x = x - lr·decay·x - lr · m / (1 - β1^t) / (√v̂ + eps)

The correction of v must not go on with t, or the learning rate would grow by what it has been corrected so far. Where v̂
is 0 nothing is known of an element's gradients, and it stays as it is.
"""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from .errors import InvalidArgument
from .views import reals


class FrozenAdam:
    """Makes the steps of an Adam or AdamW whose second moment is frozen after so many exchanges."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, warmup: int, who: str) -> None:
        if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            what = "no optimizer" if optimizer is None else type(optimizer).__name__
            raise InvalidArgument(
                f"{who} takes over the step of a torch.optim.Adam or AdamW and got {what}; try: one of these, or an "
                "algorithm for any optimizer, e.g. 'bytegrad'"
            )
        if has_own_step(optimizer):
            raise InvalidArgument(
                f"{who} takes over the step of a torch.optim.Adam or AdamW, and {type(optimizer).__name__} has one of "
                "its own, which would not be made any more; try: torch.optim.AdamW, or an algorithm for any optimizer, "
                "e.g. 'bytegrad'"
            )
        self._optimizer = optimizer
        self._warmup = warmup
        # By the parameter's id: its steps at the freeze; what its momentum is multiplied with, and whether that is
        # nowhere 0.
        self._frozen: dict[int, float] = {}
        self._factors: dict[int, tuple[Tensor, bool]] = {}
        # Its steps so far: asking the state would let the host wait where that is on a GPU.
        self._steps: dict[int, float] = {}

    def is_due(self, exchanges: int) -> bool:
        """Whether the last of so many exchanges was one of momentum."""
        return exchanges > self._warmup

    @torch.no_grad()
    def step(self) -> None:
        """One step of all parameters that have a gradient."""
        found_inf = getattr(self._optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return
        scale = getattr(self._optimizer, "grad_scale", None)
        unknown = 0
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    unknown += self._update(parameter, group, scale)
        if unknown:
            warnings.warn(
                f"{unknown} parameters got no gradient in the warm-up: nothing is known of their second moment, and "
                "they are not updated any more. Give it a longer warm-up.",
                stacklevel=2,
            )

    def _update(self, parameter: Tensor, group: Mapping[str, Any], scale: Tensor | None) -> bool:
        """Gives whether this is a parameter of which nothing is known, for the first time."""
        state = self._optimizer.state[parameter]
        unknown = not state
        if unknown:
            # where Adam itself has it
            on_device = group.get("fused") or group.get("capturable")
            state["step"] = torch.zeros((), device=parameter.device if on_device else None)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(parameter)
        factor, whole = self._factor(parameter, state, group)
        gradient, beta = reals(cast("Tensor", parameter.grad)), group["betas"][0]
        if scale is not None:
            gradient = gradient / scale
        momentum, values = reals(state["exp_avg"]), reals(parameter)
        steps = self._steps[id(parameter)] = self._steps[id(parameter)] + 1
        state["step"] += 1
        momentum.lerp_(-gradient if group["maximize"] else gradient, 1 - beta)
        lr = float(group["lr"])
        if group["weight_decay"] and whole:
            values.mul_(1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            values.addcmul_(values, (factor != 0).to(values.dtype), value=-lr * group["weight_decay"])
        values.addcmul_(momentum, factor, value=-lr / (1 - beta**steps))
        return unknown

    def _factor(self, parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[Tensor, bool]:
        """1 / (√v̂ + eps), and 0 where v̂ is 0. Worked out once; the state does not change any more."""
        key = id(parameter)
        if key not in self._factors:
            self._steps[key] = float(state["step"])
            steps = self._frozen.setdefault(key, self._steps[key])
            moment = reals(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"])
            root = (moment / (1 - group["betas"][1] ** steps)).sqrt_() if steps else torch.zeros_like(moment)
            known = root > 0
            self._factors[key] = torch.where(known, 1 / (root + group["eps"]), 0), bool(known.all())
        return self._factors[key]

    def state_dict(self, named: Mapping[str, Tensor]) -> dict[str, float]:
        """The steps of each parameter at the freeze, by name."""
        return {name: self._frozen[id(p)] for name, p in named.items() if id(p) in self._frozen}

    def load_state_dict(self, state: Mapping[str, float], named: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` gave. The optimizer's state is another one now, so what came of it goes."""
        self._factors.clear()
        self._steps.clear()
        self._frozen = {id(named[name]): steps for name, steps in state.items() if name in named}


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it does not make Adam's step as torch wrote it. Its class counts, since a scheduler puts a step on the
    object; not what is wrapped around it, by us or by torch, which puts hooks there."""
    kinds = [kind for kind in type(optimizer).__mro__ if kind.__module__.partition(".")[0] != "offbeat"]
    step = next(vars(kind)["step"] for kind in kinds if "step" in vars(kind))
    torchs = (torch.optim.Adam.step, torch.optim.AdamW.step)
    return inspect.unwrap(step) not in {inspect.unwrap(each) for each in torchs}
