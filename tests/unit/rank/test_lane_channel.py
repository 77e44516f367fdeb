"""LaneChannel over real sockets: answers go out, and an error in its thread is the rank's failure, not silence."""

from collections.abc import Callable, Iterator

import pytest

from tandem.workers.executor.rank_channel import SocketChannel
from tandem.workers.messages.channel import ChannelContext, lanes_name, new_secret
from tandem.workers.messages.handshake import FromRank, RankFailed, RankReady
from tandem.workers.messages.request import AdapterRef
from tandem.workers.messages.transfer import DropAdapter, TransferOp, TransferResult
from tandem.workers.rank.transfers.lane_channel import LaneChannel

DROP = DropAdapter(ticket=1, adapter=AdapterRef(name="a", digest="d", source="s"))
TIMEOUT_S = 60.0


class Pair:
    """A coordinator's channel and the lane channel of rank 3."""

    def __init__(self) -> None:
        secret = new_secret()
        self.coordinator = SocketChannel(secret, "127.0.0.1")
        self.context = ChannelContext()
        self.lanes = LaneChannel(self.context, secret, self.coordinator.endpoint, 3)

    def serve(self, take: Callable[[TransferOp], object]) -> None:
        self.lanes.serve(take)
        self.lanes.send(RankReady(3))
        assert self.hear() == RankReady(3)

    def hear(self) -> FromRank | None:
        return self.coordinator.receive(TIMEOUT_S)

    def close(self) -> None:
        self.context.term()
        self.lanes.join(TIMEOUT_S)
        assert not self.lanes.is_alive()
        self.coordinator.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_ops_go_to_the_lanes_and_answers_back(pair: Pair) -> None:
    pair.serve(lambda op: pair.lanes.send(TransferResult(rank=3, ticket=op.ticket)))
    pair.coordinator.send(3, DROP)
    assert pair.hear() == TransferResult(rank=3, ticket=1)


def test_a_lane_that_does_not_exist_ends_the_rank(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    def take(op: TransferOp) -> None:
        raise KeyError("placement")

    pair.serve(take)
    pair.coordinator.send(3, DROP)
    failed = pair.hear()
    assert isinstance(failed, RankFailed) and failed.rank == 3 and not failed.by_step
    assert failed.message == "its lane channel failed: KeyError: 'placement'"
    assert "the lane channel of rank 3 failed" in caplog.text and "Traceback" in caplog.text
    pair.lanes.send(TransferResult(rank=3, ticket=1))  # a lane that is still at work


def test_bytes_that_are_no_op_end_the_rank(pair: Pair) -> None:
    pair.serve(lambda op: None)
    pair.coordinator._socket.send_multipart([lanes_name(3), b"\x00 no op"])
    failed = pair.hear()
    assert isinstance(failed, RankFailed) and "its lane channel failed: " in failed.message
