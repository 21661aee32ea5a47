"""Beam search: find the likeliest whole answers instead of the likeliest next token.

The beams of a group are ordinary requests, forked with copy-on-write pages and batched with all others. In a step a
beam offers its likeliest next tokens; when all beams of the group have offered, the best continuations become the new
beams. A beam that has offered waits for the others and keeps its pages unless no other request can proceed. To prevent
deadlock, groups run at the same time only if there are resources for all of them to finish. A group that does not fit
waits, and no other group begins before it.

Source: the search of transformers' `generate(num_beams=...)`, including its scores and its three early-stopping modes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lorasrv.memory.request_allocator import RequestAllocator
from lorasrv.outputs import RequestId
from lorasrv.request import Request, RequestStatus
from lorasrv.sampling_params import BeamOptions

Offer = Sequence[tuple[int, float]]
"""(token id, log-probability) of a beam's next tokens, likeliest first. `InputProcessor` ensures that, besides the
tokens that end the answer, at least as many continue it as there are beams."""


class Hypothesis(NamedTuple):
    """Hold a whole answer. `score` is its log-probability divided by its length to the power of the length penalty."""

    score: float
    token_ids: tuple[int, ...]


class Child(NamedTuple):
    """Extend the beam `parent` by one token."""

    parent: int
    token_id: int
    score: float


@dataclass(slots=True)
class BeamState:
    """Search on numbers alone, without requests or pages."""

    options: BeamOptions
    max_tokens: int
    # Token ids that end an answer.
    ends: frozenset[int]
    num_generated: int = 0
    # Sum of log-probabilities, one entry per beam.
    scores: list[float] = field(default_factory=lambda: [0.0])
    # The best whole answers, best first.
    finished: list[Hypothesis] = field(default_factory=list)

    def advance(self, offers: Sequence[Offer], answers: Sequence[Sequence[int]]) -> list[Child]:
        """Extend the beams by one token.

        Args:
            offers: one per beam in `scores`; at the start there is only one beam.
            answers: the tokens that each of these beams has generated.
        Returns:
            The new beams, best first; empty when the search is over.
        """
        width = self.options.width
        scored = zip(self.scores, offers, strict=True)
        children = [Child(beam, t, score + p) for beam, (score, offer) in enumerate(scored) for t, p in offer]
        children.sort(key=lambda child: (-child.score, child.parent, child.token_id))
        self.num_generated += 1
        going_on = [child for child in children if not self._ends(child)][:width]
        self._finish([(child, answers[child.parent]) for child in children[:width] if self._ends(child)])
        self.scores = [child.score for child in going_on]
        return [] if self._is_over() else going_on

    def _ends(self, child: Child) -> bool:
        return child.token_id in self.ends or self.num_generated == self.max_tokens

    def _finish(self, ended: Sequence[tuple[Child, Sequence[int]]]) -> None:
        if self._is_full and self.options.early_stopping is True:
            return
        whole = [Hypothesis(self._penalized(c.score, self.num_generated), (*a, c.token_id)) for c, a in ended]
        self.finished = sorted([*self.finished, *whole], key=lambda one: -one.score)[: self.options.width]

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self.options.width

    def _is_over(self) -> bool:
        if self.num_generated == self.max_tokens or not self.scores:
            return True
        if not self._is_full:
            return False
        may_improve = self.options.early_stopping == "never" and self.options.length_penalty > 0
        length = self.max_tokens if may_improve else self.num_generated
        better = self._penalized(self.scores[0], length) > self.finished[-1].score
        return self.options.early_stopping is True or not better

    def _penalized(self, score: float, length: int) -> float:
        return score / math.pow(length, self.options.length_penalty)


@dataclass(slots=True)
class _Group:
    """Hold one search and its requests."""

    state: BeamState
    # In the order in which they were added.
    requests: list[Request] = field(default_factory=list)
    # In the order of the search.
    beams: list[Request] = field(default_factory=list)
    offers: dict[RequestId, Offer] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.state.options.width

    @property
    def adapter_id(self) -> str:
        return self.requests[0].message.adapter_id

    @property
    def is_ready(self) -> bool:
        return len(self.offers) == self.state.options.width


AllowTogether = Callable[[Iterable[Request]], bool]
"""Whether groups can run to their ends at the same time, given one beam of each: `Quotas.allow_together`."""


class BeamGroups:
    """Hold the unfinished groups, oldest first. Mutated by the engine thread only.

    Args:
        allocator: forks the pages of beams.
        eos: tokens that end any answer.
    """

    def __init__(self, allocator: RequestAllocator, eos: frozenset[int]) -> None:
        self._allocator = allocator
        self._eos = eos
        self._groups: dict[RequestId, _Group] = {}
        # Groups with a beam that has run.
        self._running: dict[RequestId, _Group] = {}
        # First group found waiting for others since the last change.
        self._next: RequestId | None = None
        self._has_changed = False
        # First beam of the newest group, whether or not the group has finished.
        self._newest: Request | None = None

    def add(self, request: Request) -> Request | None:
        """Add a beam. The beams of a group come one after another.

        Returns:
            The first beam if the group is finished already; otherwise None.
        """
        message = request.message
        assert message.beams is not None
        if message.fork_of is None:
            eos = frozenset[int]() if request.sampling.ignore_eos else self._eos
            ends = eos.union(request.sampling.stop_token_ids)
            state = BeamState(message.beams, message.max_tokens, ends)
            self._groups[request.request_id], self._newest = _Group(state), request
        assert self._newest is not None
        assert self._newest.request_id == _name(request), "beams of another group come in between"
        if (group := self._groups.get(_name(request))) is None:
            return self._newest
        group.requests.append(request)
        group.beams.append(request)
        return None

    def must_wait(self, request: Request, allow_together: AllowTogether) -> bool:
        """Return whether a beam must not be admitted now: it has offered and waits for its group, or its group waits
        for others."""
        if request.message.beams is None:
            return False
        name = _name(request)
        if request.request_id in self._groups[name].offers:
            return True
        if name in self._running or not self._running:
            return False
        return self._next not in (None, name) or not allow_together([*self._first_beams(), request])

    def num_missing(self, adapter_id: str) -> int:
        """Return how many beams of an adapter do not run although their groups do."""
        groups = [group.requests for group in self._running.values() if group.adapter_id == adapter_id]
        return sum(beam.status is not RequestStatus.RUNNING for beams in groups for beam in beams)

    def num_more(self, request: Request, most: int) -> int:
        """Return for how many more requests of its adapter there must be room before a request may begin: its own
        beams and, as a group begins only when all its beams may run, those of groups that came before it.

        Args:
            most: beams that may run together; wider groups are passed over.
        """
        if request.message.beams is not None and self.is_of_running_group(request):
            return 0
        own = 1 if request.message.beams is None else request.message.beams.width
        name, adapter_id = _name(request), request.message.adapter_id
        return own + sum(
            group.width
            for other, group in self._groups.items()
            if other != name
            and other not in self._running
            and group.adapter_id == adapter_id
            and group.width <= most
            and group.requests[0].number < request.number
        )

    def hold_back(self, request: Request) -> None:
        """Note that a beam must wait. Among the groups that wait for others, the first one begins first."""
        if not self.is_of_running_group(request):
            self._next = self._next or _name(request)

    def take_changed(self) -> bool:
        """Return whether a group that waited for others may begin since the last call."""
        changed, self._has_changed = self._has_changed, False
        if changed:
            self._next = None
        return changed

    def is_of_running_group(self, request: Request) -> bool:
        """Return whether a beam belongs to a group that runs."""
        return _name(request) in self._running

    def on_admitted(self, request: Request, allow_together: AllowTogether) -> None:
        """Note that a request is running now."""
        if request.message.beams is None or self.is_of_running_group(request):
            return
        assert not self.must_wait(request, allow_together), "a group of beams runs that must wait"
        name = _name(request)
        self._running[name] = self._groups[name]
        self._has_changed |= self._next == name

    def stop_youngest(self, allow_together: AllowTogether) -> list[Request]:
        """Stop the youngest of the groups that run if they do not fit together any more, because limits were lowered.

        Returns:
            Its running beams, which must be preempted.
        """
        if len(self._running) < 2 or allow_together(self._first_beams()):
            return []
        name = next(reversed(self._running))
        beams = [beam for beam in self._running[name].requests if beam.status is RequestStatus.RUNNING]
        if any(beam.num_in_flight_tokens for beam in beams):
            return []
        del self._running[name]
        return beams

    def _first_beams(self) -> list[Request]:
        return [group.requests[0] for group in self._running.values()]

    def offer(self, request: Request, offer: Offer) -> None:
        """Record the offer of a beam whose tokens are all computed."""
        self._groups[_name(request)].offers[request.request_id] = offer

    def advance(self, finish: Callable[[Request, Hypothesis], None]) -> int:
        """Advance the groups whose beams have all offered.

        Args:
            finish: called for every request of a finished group with its answer; the first request gets the best one.
        Returns:
            The number of generated tokens.
        """
        tokens = 0
        for name, group in list(self._groups.items()):
            if not group.is_ready:
                continue
            state, beams = group.state, group.beams
            first = beams[:1] if not state.num_generated else beams
            answers = [beam.token_ids[beam.num_prompt_tokens :] for beam in first]
            children = state.advance([group.offers[beam.request_id] for beam in first], answers)
            group.offers.clear()
            tokens += state.options.width
            if children:
                group.beams = self._moved(beams, children)
                continue
            self._drop(name)
            for request, answer in zip(group.requests, state.finished, strict=True):
                finish(request, answer)
        return tokens

    def remove(self, request: Request) -> list[Request]:
        """Drop the group of a beam that has finished outside the search; return its other beams, which must finish
        too."""
        group = self._drop(_name(request))
        return [] if group is None else [other for other in group.requests if other is not request]

    def _drop(self, name: RequestId) -> _Group | None:
        self._has_changed = True
        self._running.pop(name, None)
        return self._groups.pop(name, None)

    def check_integrity(self, requests: Mapping[RequestId, Request]) -> None:
        """Compare the groups with the live requests.

        Raises:
            AssertionError: a group has a beam that is gone, or a live beam has no group.
        """
        beams = {r.request_id: r for group in self._groups.values() for r in group.requests}
        assert beams == {rid: r for rid, r in requests.items() if r.message.beams is not None}, "beams differ"
        assert self._running.keys() <= self._groups.keys(), "a group runs that is gone"

    def _moved(self, beams: Sequence[Request], children: Sequence[Child]) -> list[Request]:
        """Return the requests of the new beams, in their order. The first child of a beam reuses its request; the
        others take the requests of beams without children."""
        with_children = {child.parent for child in children}
        spare = [beam for place, beam in enumerate(beams) if place not in with_children]
        tokens = [[*beams[child.parent].token_ids, child.token_id] for child in children]
        taken: set[int] = set()
        moved = []
        for child in children:
            parent = beams[child.parent]
            moved.append(parent if child.parent not in taken else spare.pop())
            taken.add(child.parent)
            if moved[-1] is not parent:
                self._allocator.fork_from(moved[-1], parent)
        for beam, known in zip(moved, tokens, strict=True):
            beam.token_ids[:] = known
        return moved


def _name(request: Request) -> RequestId:
    return request.message.fork_of or request.request_id
