"""What the event loop tells the engine's thread: frozen messages without tensors."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lorasrv.questions import Question
from lorasrv.request import AddRequest, RequestId

if TYPE_CHECKING:
    from lorasrv.engine import Engine


@dataclass(frozen=True, slots=True)
class Add:
    """The choices of one request: together, so that all of them find the same adapters in the pool."""

    messages: tuple[AddRequest, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """A question, whose answer comes back under this number; None: nobody waits for it any more."""

    number: int
    question: Question | None


@dataclass(frozen=True, slots=True)
class End:
    """A stream has ended before its request: the client left, or a stop string was met."""

    request_id: RequestId
    stopped: bool


class Wake:
    """An adapter has arrived."""


class Stop:
    """The server ends."""


Message = Add | Ask | End | Wake | Stop


def act_on(message: Message, engine: "Engine") -> bool:
    """Do what a message says, in the engine's thread; False if it is the end."""
    match message:
        case Add():
            for added in message.messages:
                engine.add_request(added)
        case Ask():
            if message.question is None:
                engine.forget_question(message.number)
            else:
                engine.ask(message.number, message.question)
        case End():
            (engine.stop if message.stopped else engine.abort)(message.request_id)
        case Stop():
            return False
        case Wake():
            pass
    return True
