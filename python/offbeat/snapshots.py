"""Where a model's parameters meet exchanges in the background: they are copied into its snapshot, and its delta is
added to them, on the host or on a GPU.

On a GPU both are tensors there. Torch's current stream copies and adds; the core takes snapshots to the host and deltas
back on a stream of its own, and the host waits for neither.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _core, devices, memory, runtime, slots, views


class Snapshots:
    """A model's snapshot and delta, in the shapes of its parameters, and the core's exchanges of them."""

    def __init__(
        self,
        group: _core.Group,
        parameters: Sequence[Tensor],
        method: str,
        arguments: dict[str, object],
        *,
        period: float | None,
        device: devices.Device | None = None,
    ) -> None:
        # the objects themselves: users may point them to other memory
        self.parameters, self._device = list(parameters), device
        counts = [views.elements(parameter) for parameter in self.parameters]
        place = None if device is None else (device.index, device.zeros)
        self.core = runtime.current().background(group, counts, method, arguments, period=period, device=place)
        flats = [memory.shown(shown) for shown in self.core.memory()]
        self._snapshots, self._deltas = (
            [views.place_in(flat, p, place) for p, place in zip(self.parameters, self.core.places, strict=True)]
            for flat in flats
        )

    @property
    def is_on_gpu(self) -> bool:
        """Whether the parameters are on a GPU."""
        return self._device is not None

    def non_finite(self) -> int:
        """How many numbers of the parameters are NaN or infinite."""
        # a norm makes no copy
        norms = [torch.linalg.vector_norm(p.detach(), float("inf")) for p in self.parameters if p.numel() > 0]
        if all(bool(norm.isfinite()) for norm in norms):
            return 0
        return sum(int((~p.detach().isfinite()).sum()) for p in self.parameters)

    def copy(self) -> None:
        """Makes the parameters the snapshot."""
        with torch.no_grad():
            slots.fill(self._snapshots, self.parameters)
        if self._device is not None:
            self.core.fetch(self._device.current_stream())

    def add(self) -> None:
        """Adds the delta to the parameters."""
        if self._device is not None:
            self.core.land(self._device.current_stream())
            self._device.joined()
        with torch.no_grad():
            torch._foreach_add_(self.parameters, self._deltas)
        if self._device is not None:
            self.core.landed(self._device.current_stream())

    def do(self, task: str, clock: int) -> None:
        """What the core asks for at a safe point, after so many steps."""
        if task == "snapshot":
            self.copy()
            self.core.taken(clock)
            return
        if task == "apply":
            self.add()
        self.core.applied()
