"""Failover: what becomes of one prompt after its group has refused or lost it. Pure decisions, without tasks.

After a loss every request that may have ended the group is a suspect, which at first runs alone in its next group
(workers/engine/waiting/probation.py). Who ends a group alone is convicted: its prompt goes to quarantine. So a query of
death ends two groups, and nobody else's request fails. Six losses in a row convict too, unless all were excused.
"""

from collections.abc import Callable, Collection

from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.generation.quarantine import Convicted
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.refusals import GROUP_ENDED, GROUP_LOST, GROUP_UNUSABLE
from tandem.workers.messages.request import Ended

MOST_LOSSES = 6
"""Groups that may be lost one after the other while they ran a request, before it is past where they were lost; and
while they had it and it had no row."""
MOST_UNKNOWN = 2
"""Most of those in an unknown step while the request was on probation. One may be a coordinator that was killed."""
MOST_REFUSALS = 3
"""Groups that are asked after a first one that is full."""


class Failover:
    """The history of one prompt. probation_tokens: see probation.py. is_suspect: it runs alone at first. avoid: groups
    that have refused it or end."""

    def __init__(self, probation_tokens: int) -> None:
        self._probation_tokens = probation_tokens
        self.is_suspect = False
        self.avoid: tuple[str, ...] = ()
        self._losses = 0
        self._unknown = 0
        self._unserved = 0
        self._is_excused = True

    def after(self, part: RequestPart, ended: Ended, has_group: Callable[[Collection[str]], bool]) -> bool:
        """Returns whether the request goes on as a new attempt; False: the same one is sent to another group. Raises
        the refusal that the client sees otherwise. has_group: whether there is a group that is not among those."""
        assert ended.refused is not None
        status, code, param, message = ended.refused
        if ended.group:
            self.avoid += (ended.group,)
        if part.has_new_tokens:
            self._unserved = 0
        if part.is_past(self._probation_tokens):
            self.is_suspect, self._is_excused, self._losses = False, True, 0
        if code == GROUP_LOST:
            self._note_loss(part, ended)
            return True
        if code in (GROUP_ENDED, GROUP_UNUSABLE):
            return True
        if status in (429, 503) and ended.group and len(self.avoid) <= MOST_REFUSALS and has_group(self.avoid):
            # Attempts above 0 pass the queue's limits (is_resumed), so that one that never had a row is sent as it is.
            # A later one passes them anyway, and one that has run may; made anew, it says what was delivered, and which
            # choices a stop string has ended.
            return part.request.attempt > 0 or part.is_begun
        raise RequestRefused(message, code=code, status=status, param=param)

    def _note_loss(self, part: RequestPart, ended: Ended) -> None:
        """Judges the part that the request had in the loss of its group. Without a row it had none, as far as anybody
        knows; but what ends a coordinator before it has a row must not go on for ever. Calls that fail at once are
        bounded by time: they may be to a group that is gone already."""
        if ended.loss == "bystander":
            return
        if ended.loss == "unknown" and not part.has_row:
            self._unserved += part.unserved_since_s is None
            if self._unserved >= MOST_LOSSES:
                raise _lost_too_often("had")
            return
        self._unknown = self._unknown + 1 if self.is_suspect and ended.loss == "unknown" else 0
        if ended.loss == "alone" or self._unknown >= MOST_UNKNOWN:
            raise Convicted
        self.is_suspect = True
        self._is_excused &= ended.loss == "excused"
        self._losses += 1
        if self._losses >= MOST_LOSSES:
            if not self._is_excused:
                raise Convicted
            raise _lost_too_often("ran")


def _lost_too_often(did: str) -> RequestRefused:
    message = f"{MOST_LOSSES} worker groups were lost one after the other while they {did} this request"
    return RequestRefused(message, code="service_unavailable", status=503)
