"""What can go wrong between ranks.

In: nothing. Out: the exceptions of this room, all of them a `CommError`. Each message names the rank or the knob.
"""


class CommError(RuntimeError):
    """Base of all errors of expert-parallel communication."""


class ContextError(CommError):
    """A context can't be made or used so: a bad argument, ranks that disagree, a context of another process."""


class RendezvousError(CommError):
    """The ranks didn't all come together, or one of them gave up. `missing`: the ranks that didn't come."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class BusyError(RendezvousError):
    """A rank is in a step, and waits there for this one: they run different programs."""


class OutOfStepError(RendezvousError):
    """A rank didn't come where others waited for it: from then on they may not mean the same by what they say next."""


class ConcludedError(CommError):
    """Something went wrong here when all ranks, this one too, had said yes: the others do what they agreed on."""


class WindowError(CommError):
    """A shared memory window can't be made, or isn't what its owner said it was."""


class CapacityError(CommError):
    """A rank has more tokens than the context holds. Raised on every rank; the context stays usable."""


class PeerError(CommError):
    """Another rank raised, died or didn't answer in time; the context is of no more use.

    rank: the rank at fault, -1 where it isn't known.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class ContextInUseError(CommError):
    """A context can't be closed while a forward uses it."""


def reason_of(error: BaseException) -> str:
    """An error's message on one line, as other ranks are told it; its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
