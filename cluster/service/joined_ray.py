"""The Ray of others that a service has joined: whether its GCS answers, for the launcher, which hears of no other end.

A head that dies takes GCS away until somebody starts it again; groups and gateways on other nodes serve meanwhile.
Ray's processes, this one among them, give up after a time that is the same for all; then the service is over.
"""

import time
from collections.abc import Callable

from tandem.configs.errors import SettingsError

PERIOD_S = 5.0


class JoinedRay:
    """One such Ray. address: as the user has it. answers: whether its GCS does now; may take a second. gives_up_s:
    after so long Ray's own processes end."""

    def __init__(
        self,
        address: str,
        answers: Callable[[], bool],
        gives_up_s: float,
        print_line: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._answers = answers
        self._lost_s = max(gives_up_s - 2 * PERIOD_S, PERIOD_S)
        self._print_line = print_line
        self._clock = clock
        self._asked_s = self._answered_s = clock()
        self._is_away = False

    def check(self) -> None:
        """Asks each PERIOD_S, and says when it stops to answer and when it does so again. SettingsError once it has not
        answered for as long as Ray's processes wait for it, nearly: a little longer, and Ray would end this one."""
        now_s = self._clock()
        if now_s - self._asked_s < PERIOD_S:
            return
        self._asked_s = now_s
        if self._answers():
            if self._is_away:
                self._print_line(f"Ray at {self._address} answers again")
            self._answered_s, self._is_away = now_s, False
            return
        away_s = now_s - self._answered_s
        if away_s >= self._lost_s:
            raise SettingsError(f"{self._address}: Ray has not answered for {away_s:.0f} s", "--address")
        if not self._is_away:
            self._print_line(
                f"Ray at {self._address} does not answer; requests go on, and no group is replaced until it does"
            )
        self._is_away = True
