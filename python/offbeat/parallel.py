"""`DataParallel`: the shape of torch's DistributedDataParallel."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from . import algorithms, runtime, settings
from .agreement import left_out, without_wrappers
from .background import BackgroundReplica
from .errors import InvalidArgument
from .local_replica import LocalReplica
from .optimizer import Counting, Wrapping, change_class, refuse_lazy, restore_class
from .replica import BucketBytes, Replica
from .replicas import make


class DataParallel(nn.Module):
    """A model whose gradients are averaged over all ranks while `backward` runs. Every rank makes one alike.

    Parameters, buffers and the state of the optimizer, if one is given, come from rank 0. Calls go to `module`.

    Args:
        model: the module to train.
        optimizer: its optimizer; needed by algorithms that communicate more than gradients.
        algorithm: a name or an instance of `offbeat.algorithms`.
        bucket_bytes: how many bytes of gradients travel together; "auto" tries sizes in the first steps.
        check_every: compare the parameters of all ranks every so many steps, and name the first that drifted.
        broadcast_buffers: give all ranks the buffers of rank 0 before each forward in training.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        algorithm: algorithms.Algorithm | str = "allreduce",
        *,
        bucket_bytes: BucketBytes = None,
        check_every: int | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidArgument(f"model must be a torch.nn.Module, not {type(model).__name__}; pass the model itself")
        super().__init__()
        self.module = model
        ignored = left_out(model)
        named = without_wrappers((name, t) for name, t in model.named_parameters() if name not in ignored)
        refuse_lazy(named)
        if not any(tensor.requires_grad for _, tensor in named):
            raise InvalidArgument(
                f"the model has no parameters that require a gradient ({len(named)} in all): there is nothing to "
                "average; call requires_grad_(True) on some first, or use the model as it is"
            )
        self._replica: Replica = make(
            self,
            named,
            algorithms.resolve(algorithm),
            optimizer=optimizer,
            bucket_bytes=settings.bucket_bytes(bucket_bytes, runtime.profiled_bucket_bytes()),
            check_every=settings.check_every(check_every),
            broadcast_buffers=broadcast_buffers,
        )
        if optimizer is not None and isinstance(self._replica, LocalReplica | BackgroundReplica):
            change_class(optimizer, Counting, Wrapping(self._replica, type(optimizer), model, None))

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Forwards in this context only accumulate: nothing is exchanged in their backward. DDP's meaning exactly."""
        return self._replica.no_sync()

    def join(self) -> AbstractContextManager[None]:
        """Around a loop in which ranks have different numbers of batches."""
        return self._replica.join()

    def __reduce__(self) -> Any:  # noqa: ANN401
        raise InvalidArgument("a wrapped model cannot be pickled or copied; save or copy .module, or its state_dict()")

    def remove(self) -> nn.Module:
        """Undoes the wrapping and gives the model back."""
        self._replica.remove()
        if isinstance(self._replica.optimizer, Counting):
            restore_class(self._replica.optimizer)
        return self.module
