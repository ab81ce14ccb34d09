"""An all-to-all of messages from rank to rank, as an operator that Inductor takes for a collective.

``fxcomm::exchange(input, group)`` starts to send slice ``r`` of a flat tensor to each rank ``r``,
and returns the tensor of what the ranks send here, by rank. ``_c10d_functional.wait_tensor`` waits
for all of it; until then the input must live, which Inductor sees to.
"""

from __future__ import annotations

import torch

from fxcomm import compat

# No gather has it: theirs are numbers of buckets. Equal tags are received in the order of sending.
_TAG = 2**30


def _exchange(sent: torch.Tensor, group_name: str) -> torch.Tensor:
    """gloo begins to send when the other side has said where to receive, and says so in the stream
    of what it sends itself. Its own all-to-all sends first, so that both sides' words come behind
    their messages: one direction of the link stands still while the other is busy, for twice the
    time if nothing else is in flight. Here both sides say so first."""
    group = compat.group_named(group_name)
    rank, world_size = group.rank(), group.size()
    received = torch.empty_like(sent)
    ours, theirs = sent.chunk(world_size), received.chunk(world_size)
    others = range(1, world_size)
    sources = [(rank - distance) % world_size for distance in others]
    targets = [(rank + distance) % world_size for distance in others]
    works = [compat.receive(group, theirs[source], source, _TAG) for source in sources]
    works += [compat.send(group, ours[target], target, _TAG) for target in targets]
    theirs[rank].copy_(ours[rank])
    for work in works:
        compat.register_work(received, work)
    return received


def _shape(sent: torch.Tensor, group_name: str) -> torch.Tensor:
    del group_name
    return torch.empty_like(sent)


_library = torch.library.Library("fxcomm", "DEF")
_library.define("exchange(Tensor input, str group_name) -> Tensor")
_library.impl("exchange", _exchange, "CPU")
_library.impl("exchange", _shape, "Meta")

exchange = torch.ops.fxcomm.exchange.default
compat.lower_as_collective(exchange)
