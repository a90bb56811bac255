"""World: everything that can happen to one hand-off, step by step, and what must never be so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, NamedTuple

from pdstore.errors import Reason
from pdstore.format.keys import BlockKey, Kind, kind_of
from tests.model.actors import Actors, Shape, Taken
from tests.model.replay import ERROR, TORN, WHOLE, Call, Ended, Looked, Meanwhile, Passed, Replays
from tests.model.watch import Rules, is_beat


class State(NamedTuple):
    """A moment.

    actors: their states, as `Replays` numbers them: what each was answered, its only input.
    faults: those that may still happen.
    stored: the values that others can see, and whether they are whole.
    in_flight: what a put has taken and nobody sees yet; it becomes visible in any order, or when
      its writer is dead.
    leased: keys that the store has promised to keep.
    is_harmed: some fault happened, so that D may get less than all.
    is_mute: a beat was lost, so that D may take P for dead.
    """

    actors: tuple[int, ...]
    faults: int
    stored: frozenset[tuple[BlockKey, str]] = frozenset()
    in_flight: frozenset[BlockKey] = frozenset()
    leased: frozenset[BlockKey] = frozenset()
    is_harmed: bool = False
    is_crashed: bool = False
    is_mute: bool = False


class WrongState(AssertionError):
    """Raised for a state that must not be."""


class World:
    """One hand-off of a shape, under the rules, with at most so many faults.

    A put is visible late and in any order (delay, reorder); the other events are faults: P crashes,
    a call fails, a value is evicted or torn, leases run out, the store comes back empty. D's time
    may be up at any look. A time without a beat passes only if P has crashed or ended, or a beat
    was lost. Where P beats, its crash is beside the number of faults. Equal states are explored
    once.
    """

    def __init__(self, shape: Shape, rules: Rules, num_faults: int) -> None:
        self._actors = Actors(shape, rules)
        self._replays = Replays(self._actors.bodies())
        self._names = list(self._actors.bodies())
        self._shape, self._rules, self._num_faults = shape, rules, num_faults
        self.endings: Counter[str] = Counter()

    def explore(self) -> int:
        """Visits every state that can be reached. Returns how many; raises WrongState."""
        first = State(self._replays.first, self._num_faults)
        seen, rest = {first}, [first]
        while rest:
            state = rest.pop()
            if self._is_over(state):
                continue
            for following in self._steps(state):
                if not following.faults:
                    following = following._replace(leased=frozenset())  # nothing tries them
                if following not in seen:
                    seen.add(following)
                    rest.append(following)
        return len(seen)

    def _next(self, state: State, number: int) -> Call | Ended:
        return self._replays.next_of(state.actors[number])

    def _steps(self, state: State) -> Iterator[State]:
        decode = len(self._names) - 1
        call = self._next(state, decode)
        if call.is_pause:  # of D alone: what others do now they may do before D's last call as well
            for meanwhile in self._pauses(state, call):
                yield self._answered(state, decode, meanwhile)
            return
        for number, name in enumerate(self._names):
            call = self._next(state, number)
            if isinstance(call, Call) and (name == "D" or self._lives(state, name)):
                yield from self._answers(state, number, call)
        for key in state.in_flight:
            stored = state.stored | {(key, WHOLE)}
            yield state._replace(stored=stored, in_flight=state.in_flight - {key})
        if state.faults:
            harmed = state._replace(faults=state.faults - 1, is_harmed=True)
            yield from self._faults(harmed)
        if self._shape.num_beats and not state.is_crashed:
            yield state._replace(is_crashed=True, is_harmed=True)

    def _faults(self, state: State) -> Iterator[State]:
        """The events that are nobody's call; `state` has paid for one."""
        for value in state.stored:
            key, condition = value
            if key not in state.leased:
                is_mute = state.is_mute or is_beat(key)
                yield state._replace(stored=state.stored - {value}, is_mute=is_mute)
            if condition == WHOLE and not is_beat(key):  # those are only looked for
                yield state._replace(stored=state.stored - {value} | {(key, TORN)})
        if state.leased:
            yield state._replace(leased=frozenset())
        if state.stored:
            is_mute = state.is_mute or any(is_beat(key) for key, _ in state.stored)
            yield state._replace(stored=frozenset(), leased=frozenset(), is_mute=is_mute)
        if not (state.is_crashed or self._shape.num_beats):
            yield state._replace(is_crashed=True)

    def _answers(self, state: State, number: int, call: Call) -> Iterator[State]:
        """Everything that the store may answer to an actor's call."""
        conditions = dict(state.stored)
        leading = [conditions[key] for key in takewhile(conditions.__contains__, call.keys)]
        found = tuple(key for key in call.keys if key in conditions)
        read = {"get": tuple(leading), "search": found}
        if call.is_look:
            for looked in self._looks(state, call):
                yield self._answered(state, number, looked)
        elif call.verb == "match":
            leased = state.leased | set(call.keys[: len(leading)])
            yield self._answered(state._replace(leased=leased), number, len(leading))
        elif call.verb in read:
            yield self._answered(state, number, read[call.verb])
        elif call.verb == "remove":
            stored = frozenset(v for v in state.stored if v[0] not in call.keys)
            yield self._answered(state._replace(stored=stored), number, None)
        elif is_beat(call.keys[0]) or self._shape.num_steps:  # as soon as D needs it
            self._check_marker(state, number, call)
            stored = state.stored | {(key, WHOLE) for key in call.keys}
            yield self._answered(state._replace(stored=stored), number, len(call.keys))
        else:
            self._check_marker(state, number, call)
            new = frozenset(key for key in call.keys if key not in conditions)
            sent = state._replace(in_flight=state.in_flight | new)
            yield self._answered(sent, number, len(call.keys))
        if state.faults:
            yield self._failed(state, number, call)

    def _failed(self, state: State, number: int, call: Call) -> State:
        """A call that raises. P that cannot store a block has to say so, if a marker can be put."""
        has_markers = any(kind_of(key) is Kind.HANDOFF for key in call.keys)
        is_harm = number == len(self._names) - 1 or has_markers
        harmed = state._replace(
            faults=state.faults - 1,
            is_harmed=state.is_harmed or is_harm,
            is_mute=state.is_mute or any(map(is_beat, call.keys)),
        )
        return self._answered(harmed, number, ERROR)

    def _answered(self, state: State, number: int, answer: Any) -> State:
        actors = list(state.actors)
        actors[number] = self._replays.after(actors[number], answer)
        return state._replace(actors=tuple(actors))

    def _looks(self, state: State, call: Call) -> Iterator[Looked]:
        """Every answer to a look of D's: what is stored, and the times that may have passed."""
        stored = dict(state.stored)
        found = tuple(key for key in call.keys if key in stored)
        yield Looked(found, Passed.A_PERIOD if self._has_beaten(state, found) else Passed.NOTHING)
        if not self._shape.num_steps:
            yield Looked(found, Passed.ALL)
        if not self._shape.num_beats:
            return
        if not any(map(is_beat, call.keys)):
            yield Looked(found, Passed.A_MOMENT)  # D does not know P
        elif state.is_mute or not self._lives(state, "beats"):
            yield Looked(found, Passed.SILENCE)

    def _pauses(self, state: State, call: Call) -> Iterator[Meanwhile | None]:
        """Every step at which D's follower may look while its worker is at work, if it has news."""
        yield None
        stored = dict(state.stored)
        found = tuple(key for key in call.keys if key in stored)
        if found:
            for step in range(self._shape.num_steps):
                yield Meanwhile(step, Looked(found, Passed.NOTHING))

    def _has_beaten(self, state: State, found: tuple[BlockKey, ...]) -> bool:
        """True if D's last look found other beats."""
        answers = self._replays.answers_of(state.actors[-1])
        before = next((a.found for a in reversed(answers) if isinstance(a, Looked)), ())
        return set(filter(is_beat, before)) != set(filter(is_beat, found))

    def _lives(self, state: State, name: str) -> bool:
        """True if P's rank, or its heartbeat, may go on."""
        if state.is_crashed or name != "beats":
            return not state.is_crashed
        return self._rules.beats and not (self._has_ended(state) and not state.in_flight)

    def _has_ended(self, state: State) -> bool:
        """True if all ranks of P are through."""
        return all(isinstance(self._next(state, n), Ended) for n in range(self._shape.num_ranks))

    def _is_over(self, state: State) -> bool:
        """True if D has ended; P does nothing then that it does not do while D waits."""
        decode = len(self._names) - 1
        call = self._next(state, decode)
        if isinstance(call, Ended):
            self._check_end(state, call.result)
            return True
        if call.is_look:
            self._check_wait(state, decode, call)
        return False

    def _check_end(self, state: State, taken: Taken) -> None:
        result = taken.result
        self.endings["whole" if result.reason is None else result.reason.value] += 1
        if not taken.is_right:
            raise WrongState(f"D counts {result.num_tokens} tokens that are not P's: {state}")
        is_lost = state.is_harmed and self._has_ended(state)  # its last marker
        is_gone = state.is_crashed or state.is_mute or is_lost
        if result.reason in (Reason.HANDOFF_DEAD, Reason.HANDOFF_GONE) and not is_gone:
            raise WrongState(f"D gives up a P that lives: {state}")
        answers = self._replays.answers_of(state.actors[-1])
        was_late = any(isinstance(a, Looked) and a.passed is Passed.ALL for a in answers)
        failed = self._actors.failed
        has_failed = failed in state.in_flight or failed in dict(state.stored)
        if not (
            state.is_harmed or was_late or has_failed or result.num_tokens == self._shape.num_tokens
        ):
            raise WrongState(f"D took {result} of a hand-off that is whole: {state}")

    def _check_wait(self, state: State, decode: int, call: Call) -> None:
        stays = {
            looked.passed
            for looked in self._looks(state, call)
            if self._answered(state, decode, looked) == state
        }
        if Passed.ALL in stays:
            raise WrongState(f"D waits for ever: {state}")
        if Passed.SILENCE in stays:
            raise WrongState(f"D waits for a P that is dead: {state}")
        is_over = self._has_ended(state) and not state.in_flight
        if is_over and not state.is_harmed and Passed.NOTHING in stays:
            raise WrongState(f"D waits although P has ended: {state}")

    def _check_marker(self, state: State, number: int, call: Call) -> None:
        """A rank says `done` only while all of its blocks can be seen, and whole."""
        if state.is_harmed or not set(call.keys) & set(self._actors.done):
            return
        missing = self._actors.blocks_of(number) - dict(state.stored).keys()
        if missing:
            raise WrongState(f"P says done and {missing} cannot be seen: {state}")
