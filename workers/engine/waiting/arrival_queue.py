"""ArrivalQueue: sequences of one tenant that wait for a row and blocks, by priority and arrival."""

import heapq

from tandem.workers.engine.base.sequence import Sequence


class ArrivalQueue:
    """Priority (the smaller the earlier), then those that have run before, then arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, bool, int, int], Sequence]] = []
        self._members: set[Sequence] = set()

    def push(self, seq: Sequence) -> None:
        self._members.add(seq)
        heapq.heappush(self._heap, (_place(seq), seq))

    def peek(self) -> Sequence | None:
        heap = self._heap
        while heap and heap[0][1] not in self._members:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def remove(self, seq: Sequence) -> None:
        """Forgets a member; its heap entry goes when it surfaces, or when such entries outnumber members."""
        self._members.remove(seq)
        if self._heap and self._heap[0][1] is seq:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(_place(member), member) for member in self._members]
            heapq.heapify(self._heap)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._members

    def __len__(self) -> int:
        return len(self._members)


def _place(seq: Sequence) -> tuple[int, bool, int, int]:
    priority, arrival, choice = seq.order
    return priority, seq.bound_step == 0, arrival, choice
