"""Replays: an actor is real code, run against answers from a history up to its next call."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pdstore.errors import StoreUnavailable
from pdstore.format.keys import BlockKey
from pdstore.store.base import Slots, Store

ERROR = "error"  # an answer: the call raises
WHOLE, TORN = "whole", "torn"  # an answer of `get`: a value as it was put, or with a bit flipped
Body = Callable[["ReplayStore"], Any]


class Passed(enum.Enum):
    """Time between a look and the one before."""

    NOTHING = enum.auto()
    A_MOMENT = enum.auto()
    A_PERIOD = enum.auto()  # of a heartbeat
    SILENCE = enum.auto()  # so long that a heartbeat would have been seen
    ALL = enum.auto()  # the asker's time is up


class Looked(NamedTuple):
    """The answer to a look: those of the keys that are stored, and the time that has passed."""

    found: tuple[BlockKey, ...]
    passed: Passed


class Meanwhile(NamedTuple):
    """The answer to a pause of D's: what its follower finds at the n-th step from here."""

    step: int
    looked: Looked


class Call(NamedTuple):
    """The call of the store that an actor makes next."""

    verb: str
    keys: tuple[BlockKey, ...]

    @property
    def is_look(self) -> bool:
        return self.verb == "look"

    @property
    def is_pause(self) -> bool:
        return self.verb == "pause"


class Ended(NamedTuple):
    """An actor that makes no more calls, and what it came to."""

    result: Any
    is_look = is_pause = False


class Suspended(BaseException):
    """Raised at the first call that the history does not answer; the package lets it pass."""

    def __init__(self, call: Call) -> None:
        self.call = call


class ReplayStore(Store):
    """Answers an actor's calls from a history.

    written: the bytes of every value that was ever put; equal keys have equal bytes.
    """

    label = "model://"

    def __init__(self, answers: Sequence[Any], written: dict[BlockKey, bytes]) -> None:
        self._answers, self._written = iter(answers), written
        self.asked = ""  # the last call that was answered

    def ask(self, verb: str, keys: Sequence[BlockKey]) -> Any:
        for answer in self._answers:
            self.asked = verb
            if answer == ERROR:
                raise StoreUnavailable(f"{verb} failed")
            return answer
        raise Suspended(Call(verb, tuple(keys)))

    def look(self, keys: Sequence[BlockKey]) -> Looked:
        looked: Looked = self.ask("look", keys)
        return looked

    def pause(self, keys: Sequence[BlockKey]) -> Meanwhile | None:
        """Asks whether the follower looks for the keys before the next call, and at which step."""
        answer: Meanwhile | None = self.ask("pause", keys)
        return answer

    def match(self, keys: Sequence[BlockKey]) -> int:
        return self.ask("match", keys)

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        found = self.ask("search", keys)
        return [key in found for key in keys]

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        conditions = self.ask("get", keys)
        for i, condition in enumerate(conditions):
            value = slots.value(i)
            value[:] = self._written[keys[i]]
            value[-1] ^= condition == TORN
        return len(conditions)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        for i, key in enumerate(keys):
            self._written[key] = bytes(slots.value(i))
        return self.ask("put", keys)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self.ask("remove", keys)

    def clear(self, namespace: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Replays:
    """The states of a model's actors, by number. Each is one history, which is run once."""

    def __init__(self, bodies: Mapping[str, Body]) -> None:
        self._bodies = bodies
        self._histories: list[tuple[str, tuple[Any, ...]]] = []
        self._next: list[Call | Ended] = []
        self._after: dict[tuple[int, Any], int] = {}
        self._written: dict[BlockKey, bytes] = {}
        self.first = tuple(self._add(name, ()) for name in bodies)

    def next_of(self, number: int) -> Call | Ended:
        """Returns what an actor in this state does."""
        return self._next[number]

    def answers_of(self, number: int) -> tuple[Any, ...]:
        """Returns the answers that led to this state."""
        return self._histories[number][1]

    def after(self, number: int, answer: Any) -> int:
        """Returns the state that follows an answer.

        It is the same one if the actor looks again, finds what it has found, and looks for the same
        next: that may go on for ever.
        """
        if (number, answer) not in self._after:
            name, history = self._histories[number]
            following = self._add(name, (*history, answer))
            is_again = (
                self._next[following] == self._next[number]
                and self._next[number].is_look
                and _found(history[-1:]) == _found((answer,))
            )
            self._after[number, answer] = number if is_again else following
        return self._after[number, answer]

    def _add(self, name: str, history: tuple[Any, ...]) -> int:
        self._histories.append((name, history))
        self._next.append(self._run(name, history))
        return len(self._next) - 1

    def _run(self, name: str, history: tuple[Any, ...]) -> Call | Ended:
        try:
            return Ended(self._bodies[name](ReplayStore(history, self._written)))
        except Suspended as suspended:
            return suspended.call


def _found(answers: tuple[Any, ...]) -> Any:
    """Returns what a look found, whatever the time was; None for another answer."""
    return answers[0].found if answers and isinstance(answers[0], Looked) else None
