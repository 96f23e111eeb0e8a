"""What users of torch's DDP pass to its constructor: accepted where it means something here, or nothing at all, and
refused with what to write instead where it would be ignored."""

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict, cast

import torch
from torch import nn

from . import runtime, settings
from .checks import is_number
from .errors import InvalidArgument, Unsupported

Device = int | str | torch.device


class Arguments(TypedDict, total=False):
    """DDP's arguments that `DataParallel` has under another name, or does not need."""

    device_ids: Sequence[Device] | None
    output_device: Device | None
    dim: int
    init_sync: bool
    process_group: object
    device_mesh: object
    bucket_cap_mb: float | None
    forward_sync_buffers: bool | None
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    skip_all_reduce_unused_params: bool
    batched_grad_copy: bool
    lazy_bucket_allocation: bool
    delay_all_reduce_named_params: object
    param_to_hook_all_reduce: object
    mixed_precision: object
    bucket_cap_mb_list: object


# By what is accepted, and what to do where it is not that.
ONLY: dict[str, tuple[object, str]] = {
    "dim": (0, "inputs are passed on as they are; try: leave it out"),
    "init_sync": (True, "ranks begin with the parameters of rank 0; try: leave it out"),
    "delay_all_reduce_named_params": (None, "every gradient is exchanged when it is ready; try: leave it out"),
    "param_to_hook_all_reduce": (None, "every gradient is exchanged when it is ready; try: leave it out"),
    "mixed_precision": (None, "try: torch.autocast around forward, or 16 bits between hosts (docs/algorithms.md)"),
    "bucket_cap_mb_list": (None, "all buckets have one size; try: bucket_bytes="),
}


def translate(
    model: nn.Module, given: Arguments, bucket_bytes: settings.BucketBytes, broadcast_buffers: bool
) -> tuple[settings.BucketBytes, bool]:
    """`bucket_bytes` and `broadcast_buffers`, by our names or by DDP's."""
    values = cast("dict[str, Any]", given)
    for name, value in values.items():
        if name not in Arguments.__annotations__:
            raise InvalidArgument(f"DataParallel has no argument {name}=; try: help(offbeat.DataParallel)")
        accepted, instead = ONLY.get(name, (value, ""))
        if value != accepted:
            raise InvalidArgument(f"{name}={value!r} has no meaning for DataParallel: {instead}")
    refuse_other_devices(model, values.get("device_ids"), values.get("output_device"))
    for name in ("process_group", "device_mesh"):
        refuse_other_ranks(name, values.get(name))
    if values.get("bucket_cap_mb") is not None:
        if bucket_bytes is not None:
            raise InvalidArgument(
                f"bucket_cap_mb= and bucket_bytes={bucket_bytes!r} are two names for one size; try: one"
            )
        bucket_bytes = from_megabytes(values["bucket_cap_mb"])
    buffers = values.get("forward_sync_buffers")
    return bucket_bytes, broadcast_buffers if buffers is None else bool(buffers)


def leave_out(module: nn.Module, params_and_buffers_to_ignore: Iterable[str]) -> None:
    """Has parameters and buffers be every rank's own, in wrappers that are made later (`agreement.left_out`)."""
    names: Any = list(params_and_buffers_to_ignore)
    module._ddp_params_and_buffers_to_ignore = names


def from_megabytes(size: object) -> int:
    """A size of buckets as DDP has it."""
    if not is_number(size) or not 0 < size < 1 << 20:
        raise InvalidArgument(f"bucket_cap_mb={size!r} is no size of buckets; try: bucket_cap_mb=25, or bucket_bytes=")
    return max(1, int(size * (1 << 20)))


def refuse_other_devices(model: nn.Module, device_ids: Sequence[Device] | None, output_device: Device | None) -> None:
    """DDP moves inputs to the device that is named; here they stay where they are, so only the model's own can be."""
    named = [*(device_ids or ()), *(() if output_device is None else (output_device,))]
    devices = {torch.device("cuda", each) if isinstance(each, int) else torch.device(each) for each in named}
    homes = {tensor.device for tensor in model.parameters()}
    if any(all((each.type, each.index or 0) != (home.type, home.index or 0) for home in homes) for each in devices):
        raise InvalidArgument(
            f"device_ids={device_ids!r}, output_device={output_device!r}, and the model is on "
            f"{', '.join(sorted(map(str, homes))) or 'no device'}: neither it nor its inputs are moved; try: "
            "model.to(device) before wrapping, and inputs.to(device) before each forward"
        )


def refuse_other_ranks(name: str, group: object) -> None:
    """Models train on all ranks."""
    size = getattr(group, "size", None)
    members = size() if callable(size) else size
    if group is not None and members != runtime.world_size():
        raise Unsupported(
            f"{name}={group!r} has {members} of {runtime.world_size()} ranks, and models train on all; try: a job of "
            "these ranks alone, or collectives with an offbeat.Group"
        )
