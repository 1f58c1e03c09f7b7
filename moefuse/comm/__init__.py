"""Expert-parallel communication: contexts, and the transports between ranks.

In: a process group and a `Capacity`. Out: `context_for`, whose tensor is the first argument of `mega_moe.ep`.
Importing this room makes that operator runnable.
"""

from moefuse.comm import expert_parallel  # noqa: F401  (registers what mega_moe.ep calls)
from moefuse.comm.capacity import Capacity
from moefuse.comm.context import CommContext, close_contexts, context_for, contexts
from moefuse.comm.errors import (
    BusyError,
    CapacityError,
    CommError,
    ConcludedError,
    ContextError,
    ContextInUseError,
    OutOfStepError,
    PeerError,
    RendezvousError,
    WindowError,
)
from moefuse.comm.timeline import Event, Timeline

__all__ = [
    "BusyError",
    "Capacity",
    "CapacityError",
    "CommContext",
    "CommError",
    "ConcludedError",
    "ContextError",
    "ContextInUseError",
    "Event",
    "OutOfStepError",
    "PeerError",
    "RendezvousError",
    "Timeline",
    "WindowError",
    "close_contexts",
    "context_for",
    "contexts",
]
