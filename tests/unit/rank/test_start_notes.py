"""Startup notes about missing kernels and streamed weights."""

import msgspec

from tandem.workers.messages.handshake import ELSEWHERE, CaptureReport, RankLoaded, RankReady
from tandem.workers.planning.start_notes import graph_notes, kernel_notes, weight_notes

MIB = 2**20
LOADED = RankLoaded(
    rank=0,
    num_blocks=1,
    weight_bytes=10 * MIB,
    block_bytes=1,
    device="cpu",
    dtype="bfloat16",
    threads=1,
    load_s=1.0,
    is_in_host_memory=True,
    resident_layers=1,
    streamed_layers=3,
    host_weight_bytes=6 * MIB,
    buffer_bytes=4 * MIB,
)


def test_no_note_where_no_layer_streams() -> None:
    resident = msgspec.structs.replace(LOADED, streamed_layers=0, host_weight_bytes=0, buffer_bytes=0)
    assert weight_notes([resident], 0.0) == ()


def test_ranks_that_are_placed_alike_share_a_line() -> None:
    both = [LOADED, msgspec.structs.replace(LOADED, rank=1)]
    assert weight_notes(both, 1 / 1024) == (
        "weights of rank 0, 1: 1 layers and the tables resident (4.0 MiB), 3 layers stream from host memory (6.0 MiB) "
        "through 4.0 MiB of buffers",
    )


def test_a_request_for_more_than_all_layers_save_has_a_note() -> None:
    all_stream = msgspec.structs.replace(LOADED, resident_layers=0)
    (note,) = weight_notes([all_stream], 1.0)
    assert note.endswith("; that saves 2.0 MiB, less than --cpu-offload-gb 1")
    (enough,) = weight_notes([all_stream], 2 / 1024)
    assert "less than" not in enough


def test_kernels_that_are_missing_everywhere_get_one_line() -> None:
    slow = [msgspec.structs.replace(LOADED, rank=rank, kernel_notes=("no compiler",)) for rank in range(2)]
    assert kernel_notes(slow) == ("no compiler",)
    assert kernel_notes([slow[0], msgspec.structs.replace(LOADED, rank=1)]) == ("rank 0: no compiler",)
    assert kernel_notes([LOADED]) == ()


def test_captures_have_one_line() -> None:
    """Of the stage with the fewest, the slowest rank and the fullest; a failure is named by its steps."""
    whole = CaptureReport(13, {}, 2.04, 2**27)
    short = CaptureReport(12, {"4 tokens, 9 blocks": "no memory"}, 1.5, 2**26)
    assert graph_notes([RankReady(0), RankReady(1)]) == ()
    assert graph_notes([RankReady(0, None, whole)]) == ("graphs: 13 in 2.0 s, 0.1 GiB",)
    assert graph_notes([RankReady(0, None, whole), RankReady(1, None, short)]) == (
        "graphs: 12 in 2.0 s, 0.1 GiB; 1 could not be captured, whose steps run eagerly; "
        "the first (4 tokens, 9 blocks): no memory",
    )
    dropped = CaptureReport(12, {"4 tokens, 9 blocks": ELSEWHERE}, 1.5, 2**26)
    for both in ((short, dropped), (dropped, short)):
        (line,) = graph_notes([RankReady(rank, None, report) for rank, report in enumerate(both)])
        assert line.endswith("(4 tokens, 9 blocks): no memory"), "as the rank says that it was"
