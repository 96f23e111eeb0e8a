"""What all ranks must have in common before and while they train: the same tensors with the same values."""

import difflib
import hashlib
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from . import _core, runtime, views
from .errors import InvalidArgument, Mismatch, Unsupported

# Tensors travel together up to this many bytes; one of ALONE or more is not worth the copy that this takes.
PACK, ALONE = 4 << 20, 1 << 20
LONGEST_DIFF = 24
Named = Sequence[tuple[str, Tensor]]

# What wrappers put before names; ranks may differ in it.
PREFIXES = ("_orig_mod.", "module.")


def plain(name: str) -> str:
    """A name without what wrappers put before it."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


def without_wrappers(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Tensors by their plain names; by their full ones where two would have the same."""
    listed = list(named)
    short = {plain(name) for name, _ in listed}
    return listed if len(short) < len({name for name, _ in listed}) else [(plain(name), t) for name, t in listed]


class Carriage(Protocol):
    """Hands tensors to the other ranks, by the way that suits where they are (`devices.Home`, `devices.Carriage`)."""

    def carries(self, tensor: Tensor, /) -> bool: ...  # whether they need no way through the host
    def broadcast(self, group: _core.Group, tensor: Tensor, source: int) -> None: ...


def refuse_sparse(named: Iterable[tuple[str, Tensor]]) -> None:
    """Only plain memory can be handed to other ranks."""
    for name, tensor in named:
        if tensor.layout is not torch.strided:
            raise Unsupported(
                f"{name} is {tensor.layout}, which cannot be handed to other ranks; try: to_dense(), or keep it out of "
                "the model"
            )


def left_out(model: nn.Module) -> set[str]:
    """The names, in this model, of parameters and buffers that are every rank's own: torch's way to tell DDP so."""
    names: set[str] = set()
    for prefix, module in model.named_modules():
        # of the model itself, also inside of wrappers
        if not prefix or not plain(f"{prefix}."):
            ignored = vars(module).get("_ddp_params_and_buffers_to_ignore", ())
            names.update(f"{prefix}.{name}" if prefix else name for name in ignored)
    return names


SAME_GROUPS = "give the optimizer the same parameters in the same order on every rank; a set() has another on each"
SAME_SETTINGS = (
    "give every rank the same algorithm with the same arguments, and an optimizer of the same kind with the same groups"
)
SAME_MODEL = "build the same model on every rank, in the same order, before wrapping it"


def compare(group: _core.Group, what: str, lines: Sequence[str], advice: str = SAME_MODEL) -> None:
    """Raises the same readable `Mismatch` on every rank if the lines of any two differ."""
    text = "\n".join(lines).encode()
    mine = torch.frombuffer(bytearray(hashlib.blake2b(text, digest_size=16).digest()), dtype=torch.uint8)
    hashes = gather(group, mine)
    if all(torch.equal(theirs, hashes[0]) for theirs in hashes):
        return
    texts = gather(group, torch.tensor(list(text), dtype=torch.uint8, device="cpu"))
    raise Mismatch(difference(what, [bytes(theirs.numpy()).decode().split("\n") for theirs in texts], advice))


def describe_algorithm(algorithm: object) -> str:
    """An algorithm in one line. Functions and objects in it are known by their names: ranks have them at other
    addresses."""
    return "algorithm " + re.sub(r" at 0x[0-9a-fA-F]+", "", repr(algorithm))


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """An optimizer in one line. Its settings come from rank 0, so they may differ."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    names = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.partition(".")[0] != "offbeat"]
    return f"optimizer {names[0]} with groups of {sizes} parameters"


def describe_groups(optimizer: torch.optim.Optimizer, named: Named) -> list[str]:
    """Which parameters an optimizer has, in its order."""
    names = {id(tensor): name for name, tensor in named}
    return [
        f"group {number}: {names.get(id(tensor), 'a parameter that is left out')}"
        for number, each in enumerate(optimizer.param_groups)
        for tensor in each["params"]
    ]


def describe(name: str, tensor: Tensor, *, buffer: bool = False) -> str:
    """A tensor in one line. Gradients and weights are exchanged as they lie in memory, buffers by their elements."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if buffer:
        return f"{name} {dtype}{list(tensor.shape)}"
    order = views.order(tensor)
    layout = "" if order == tuple(sorted(order)) else f" with dimensions in memory as {list(order)}"
    return f"{name} {dtype}{list(tensor.shape)}{layout}{'' if tensor.requires_grad else ' frozen'}"


def compare_model(group: _core.Group, algorithm: object, optimizer: torch.optim.Optimizer | None, named: Named) -> None:
    """Raises the same `Mismatch` on every rank unless all train the same parameters in the same way."""
    lines = [describe_algorithm(algorithm)]
    if optimizer is not None:
        lines.append(describe_optimizer(optimizer))
    compare(group, "settings", lines, SAME_SETTINGS)
    compare(group, "parameters", [describe(name, tensor) for name, tensor in named])
    if optimizer is not None:
        # settings and state are handed over by groups and places in them
        compare(group, "groups of parameters", describe_groups(optimizer, named), SAME_GROUPS)


def compare_buffers(group: _core.Group, named: Named) -> None:
    """Raises the same `Mismatch` on every rank unless all have the same buffers."""
    compare(group, "buffers", [describe(name, tensor, buffer=True) for name, tensor in without_wrappers(named)])


def difference(what: str, lists: Sequence[Sequence[str]], advice: str) -> str:
    """How the lists of the ranks differ from that of rank 0."""
    text = [f"ranks have different {what}:"]
    for rank, lines in enumerate(lists):
        if lines != lists[0]:
            changes = [
                line
                for line in difflib.unified_diff(list(lists[0]), list(lines), lineterm="", n=0)
                if not line.startswith(("---", "+++", "@@"))
            ]
            text.append(f"  rank {rank} against rank 0 ({len(lines)} and {len(lists[0])} in all):")
            text += [f"    {line}" for line in changes[:LONGEST_DIFF]]
            if len(changes) > LONGEST_DIFF:
                text.append(f"    … and {len(changes) - LONGEST_DIFF} more lines")
    text.append(f"try: {advice}")
    return "\n".join(text)


def broadcast_tensors(group: _core.Group, tensors: Iterable[Tensor], source: int, carriage: Carriage) -> None:
    """Gives all ranks the values that `source` has. Small tensors travel together."""
    mine = runtime.rank() == source
    with torch.no_grad():
        for pack in packs(tensors):
            carried = carriage.carries(pack[0])
            if len(pack) == 1 and pack[0].is_contiguous() and (carried or pack[0].device.type == "cpu"):
                carriage.broadcast(group, pack[0], source)
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in pack])
            # what is on a device that nobody carries goes through the host
            flat = flat if carried else flat.cpu()
            carriage.broadcast(group, flat, source)
            if not mine:
                sizes = [tensor.numel() for tensor in pack]
                for tensor, piece in zip(pack, torch.split(flat, sizes), strict=True):
                    tensor.copy_(piece.view(tensor.shape))


def buffers_of(model: nn.Module, ignored: set[str]) -> list[tuple[str, Tensor]]:
    """A model's buffers, but for those that are every rank's own."""
    return [(name, tensor) for name, tensor in model.named_buffers() if name not in ignored]


def hand_out(
    group: _core.Group,
    tensors: tuple[nn.Module, set[str], Named],
    optimizer: torch.optim.Optimizer | None,
    source: int,
    carriage: Carriage,
) -> None:
    """Gives all ranks what `source` has: all of a model but what is every rank's own, the parameters that are trained,
    and the optimizer's state of these."""
    model, ignored, named = tensors
    others = [(name, tensor) for name, tensor in model.named_parameters() if name not in ignored]
    everything = {id(tensor): tensor for _, tensor in (*others, *buffers_of(model, ignored), *named)}
    broadcast_tensors(group, everything.values(), source, carriage)
    if optimizer is not None:
        broadcast_optimizer(group, optimizer, source, [tensor for _, tensor in named], carriage)


def contents(tensor: Tensor) -> Tensor:
    """What must be copied to copy the tensor: each place in memory once, in a type that the core can carry."""
    if tensor.layout is not torch.strided:
        raise Unsupported(
            f"a tensor of shape {tuple(tensor.shape)} is {tensor.layout}, which cannot be handed to other ranks; try: "
            "to_dense(), or keep it out of the model"
        )
    view = views.reals(tensor)
    for dimension, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if stride == 0 and size > 1:  # expanded
            view = view.narrow(dimension, 0, 1)
    return view.view(torch.uint8) if view.is_floating_point() and view.dtype.itemsize == 1 else view


def packs(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Small tensors of one type and place together, up to a size; large ones alone."""
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in map(contents, tensors):
        if tensor.nbytes >= ALONE:
            yield [tensor]
        elif tensor.numel():
            by_type.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for of_type in by_type.values():
        pack: list[Tensor] = []
        size = 0
        for tensor in of_type:
            if pack and size + tensor.nbytes > PACK:
                yield pack
                pack, size = [], 0
            pack.append(tensor)
            size += tensor.nbytes
        yield pack


def broadcast_optimizer(
    group: _core.Group,
    optimizer: torch.optim.Optimizer,
    source: int,
    parameters: Sequence[Tensor],
    carriage: Carriage,
) -> None:
    """Gives all ranks the optimizer's state and settings that `source` has, without changing a type on the way."""
    mine = runtime.rank() == source
    states = [outline(optimizer.state.get(parameter, {}), parameter) for parameter in parameters]
    groups = [{key: value for key, value in each.items() if key != "params"} for each in optimizer.param_groups]
    states, groups = told_by(group, source, (states, groups))
    tensors: list[Tensor] = []
    for parameter, entries in zip(parameters, states, strict=True):
        if not mine:
            known = optimizer.state.get(parameter, {})
            state = {key: fill(entry, known.get(key), parameter) for key, entry in entries.items()}
            if state:
                optimizer.state[parameter] = state
            else:
                optimizer.state.pop(parameter, None)
        current = optimizer.state.get(parameter, {})
        tensors += [current[key] for key, entry in entries.items() if isinstance(entry, Outline)]
    if not mine:
        for each, settings in zip(optimizer.param_groups, groups, strict=True):
            each.update(settings)
    broadcast_tensors(group, tensors, source, carriage)


def told_by(group: _core.Group, source: int, value: object) -> Any:  # noqa: ANN401
    """What `source` has here, on all ranks."""
    try:
        data = pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidArgument(
            f"the optimizer's state or settings cannot be handed to other ranks ({error}); try: plain values, and "
            "functions of a module instead of a lambda"
        ) from None
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    mine = mine if runtime.rank() == source else mine[:0]
    return pickle.loads(bytes(gather(group, mine)[source].numpy()))


class Outline:
    """A tensor without its values."""

    def __init__(self, tensor: Tensor, parameter: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        # ranks have devices of other numbers
        self.beside = tensor.device == parameter.device


def outline(state: dict[str, object], parameter: Tensor) -> dict[str, object]:
    """A parameter's state without the values of its tensors."""
    return {key: Outline(value, parameter) if isinstance(value, Tensor) else value for key, value in state.items()}


def fill(entry: object, known: object, parameter: Tensor) -> object:
    """A place for the values: the tensor that is there already if it fits, or a new one."""
    if not isinstance(entry, Outline):
        return entry
    if isinstance(known, Tensor) and (tuple(known.shape), known.dtype) == (entry.shape, entry.dtype):
        return known
    return torch.empty(entry.shape, dtype=entry.dtype, device=parameter.device if entry.beside else "cpu")


def compare_values(group: _core.Group, named: Named, step: int, *, working: bool = True) -> None:
    """Raises the same `Mismatch` on every rank, with the first tensor that drifted, unless all have the same bits.

    A rank that is not working only takes part: its parameters are old, and that is no drift.
    """
    digests = [digest(tensor) for _, tensor in named]
    mine = torch.tensor([int(working), *digests], dtype=torch.int64, device="cpu")
    theirs = gather(group, mine)
    ranks = [rank for rank, row in enumerate(theirs) if row[0]]
    rows = torch.stack([theirs[rank][1:] for rank in ranks])
    differ = (rows != rows[0]).any(dim=0)
    if not differ.any():
        return
    first = int(differ.int().argmax())
    others = ", ".join(str(rank) for rank, row in zip(ranks, rows, strict=True) if row[first] != rows[0, first])
    raise Mismatch(
        f"replicas have drifted apart by step {step}: {named[first][0]} is not on rank {others} what it is "
        f"on rank {ranks[0]}, nor are {int(differ.sum()) - 1} others of {len(named)}; "
        "try: look for changes to parameters outside of the optimizer, different seeds, or non-finite values"
    )


def digest(tensor: Tensor) -> int:
    """A number for a tensor's bytes."""
    return _core.digest(views.reals(tensor).contiguous().cpu())


def hosts(group: _core.Group) -> list[int]:
    """Of each rank the lowest one on its host."""
    links = runtime.current().links()
    first = min(link["rank"] for link in links if link["kind"] in ("self", "shared memory"))
    return [int(theirs) for theirs in gather(group, torch.tensor([first], device="cpu"))]


def gather(group: _core.Group, tensor: Tensor) -> list[Tensor]:
    """What all ranks have."""
    capsules = group.all_gather(tensor, False)
    return [from_dlpack(capsule) for capsule in capsules] if isinstance(capsules, list) else []
