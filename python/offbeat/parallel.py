"""`DataParallel`: the shape of torch's DistributedDataParallel."""

from contextlib import AbstractContextManager
from typing import Any, Never, Unpack

import torch
from torch import Tensor, nn

from . import algorithms, ddp, hooks, owners, runtime, settings
from .errors import InvalidArgument, Unsupported
from .joining import Joins
from .optimizer import Distributed, Wrapping, all_parameters, change_class, restore_class
from .replica import Options, Replica
from .replicas import AnyReplica, make


class DataParallel(Joins, nn.Module):
    """A model whose gradients are averaged over all ranks while `backward` runs. Every rank makes one alike.

    Parameters, buffers and the state of the optimizer, if one is given, come from rank 0. Calls go to `module`. The
    optimizer stays the very same object and gets what `DistributedOptimizer` gives it; its state has the algorithm's.
    A model that is wrapped already is wrapped anew, and the wrapper before it trains no more.

    A copy, deep or pickled, is wrapped by itself in its first forward in training, which every rank makes then.

    Args:
        model: the module to train.
        optimizer: its optimizer; needed by algorithms that communicate more than gradients.
        algorithm: a name or an instance of `offbeat.algorithms`.
        bucket_bytes: how many bytes of gradients travel together; "auto" tries sizes in the first steps.
        check_every: compare the parameters of all ranks every so many steps, and name the first that drifted.
        broadcast_buffers: give all ranks the buffers of rank 0 before each forward in training.
        of_ddp: the other arguments of torch's DDP, by name: those that have nothing to say here are accepted, the
            others refused with what to write instead (`docs/training.md`).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        algorithm: algorithms.Algorithm | str = "allreduce",
        *,
        bucket_bytes: settings.BucketBytes = None,
        check_every: int | None = None,
        broadcast_buffers: bool = True,
        **of_ddp: Unpack[ddp.Arguments],
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidArgument(
                f"model must be a torch.nn.Module, not {type(model).__name__}; try: pass the model itself"
            )
        if not isinstance(optimizer, torch.optim.Optimizer | None):
            raise InvalidArgument(
                f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}; try: pass it by name, or "
                "leave it out; DDP's device_ids is not needed: move model and inputs to their device"
            )
        bucket_bytes, broadcast_buffers = ddp.translate(model, of_ddp, bucket_bytes, broadcast_buffers)
        super().__init__()
        self.module = model
        self._algorithm = algorithms.resolve(algorithm)
        self._options: Options = {
            "optimizer": optimizer,
            "bucket_bytes": settings.bucket_bytes(bucket_bytes, runtime.profiled_bucket_bytes()),
            "check_every": settings.check_every(check_every),
            "broadcast_buffers": broadcast_buffers,
        }
        # Whether another wrapper trains the model now.
        self._replaced = False
        # Whether it is a copy that nobody has trained yet.
        self._asleep = False
        # How many parameters the model had when it was last looked at.
        self._count = 0
        self._replica: AnyReplica | None = None
        self._wrap()

    def _wrap(self) -> AnyReplica:
        """Has gradients averaged from now on. Every rank does so."""
        model, optimizer = self.module, self._options["optimizer"]
        named = all_parameters(model)
        if not any(tensor.requires_grad for _, tensor in named):
            raise InvalidArgument(
                f"the model has no parameters that require a gradient ({len(named)} in all): there is nothing to "
                "average; try: requires_grad_(True) on some first, or use the model as it is"
            )
        for owner in owners.owners(model.parameters()):
            if isinstance(owner.model, DataParallel) and owner.model.module is model:
                owner.model.remove()
                owner.model._replaced = True
        replica = make(self, named, self._algorithm, **self._options)
        self._replica, self._asleep = replica, False
        if optimizer is not None:
            change_class(optimizer, Wrapping(replica, type(optimizer), model, None, is_whole=True))
        self._count = sum(1 for _ in model.parameters())
        if isinstance(replica, Replica):
            replica.late = self._late
        return replica

    def _late(self) -> list[tuple[str, Tensor]] | None:
        """All parameters, if the model has more than it had."""
        count, before = sum(1 for _ in self.module.parameters()), self._count
        self._count = count
        return all_parameters(self.module) if count > before else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if self._replaced and self.training and torch.is_grad_enabled():
            raise InvalidArgument(
                "this model was wrapped again, and the new wrapper exchanges its gradients; try: call that one, or "
                "remove() it and wrap the model once more"
            )
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Forwards in this context only accumulate: nothing is exchanged in their backward. DDP's meaning exactly."""
        return self._awake().no_sync()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether gradients are exchanged after the forwards to come: what `no_sync()` says, by DDP's name."""
        return not self._awake().is_held

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, exchanged: bool) -> None:
        self._awake().is_held = not exchanged

    def saw(self, samples: float) -> None:
        """Says how many samples the next backward is of, where an algorithm is `weighted`: ranks count by these."""
        self._awake().saw(samples)

    def _joined(self) -> AnyReplica:
        return self._awake()

    def register_comm_hook(self, state: object, hook: object) -> Never:  # noqa: ARG002
        """Refused: what a hook does in DDP, an algorithm does here."""
        raise Unsupported(
            "a communication hook is made for DDP's buckets; try: algorithm=, with one of offbeat.algorithms or with "
            "steps of your own (docs/algorithms.md)"
        )

    # By the names under which those who come from DDP call them on the class and on the object.
    _set_params_and_buffers_to_ignore_for_model = staticmethod(ddp.leave_out)

    def _set_static_graph(self) -> None:
        """Nothing has to be said of the graph: what a backward uses is seen each time."""

    def _awake(self) -> AnyReplica:
        """The replica, also of a copy. Every rank asks for it alike."""
        return self._wrap() if self._replica is None else self._replica

    def _training_begins(self) -> None:
        if self._asleep:
            replica = self._wrap()
            # its hooks run from the next forward on; a copy has no optimizer, so it is none of those in the background
            if isinstance(replica, Replica):
                replica.forward_begins()

    def __getstate__(self) -> dict[str, Any]:
        # Copying is no call that ranks make together: one may save alone, or keep an average of weights.
        new = {"_asleep": True, "_replica": None, "_replaced": False, "_options": self._options | {"optimizer": None}}
        return self.__dict__ | new

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        hooks.before_training(self, DataParallel._training_begins)

    def remove(self) -> nn.Module:
        """Undoes the wrapping and gives the model back."""
        self._asleep = False
        replica = self._replica
        if replica is not None:
            replica.remove()
            # somebody else may have wrapped it since
            if isinstance(replica.optimizer, Distributed) and replica.optimizer._offbeat.replica is replica:
                restore_class(replica.optimizer)
        return self.module
