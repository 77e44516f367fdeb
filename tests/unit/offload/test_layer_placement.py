"""Choice of streamed layers: evenly spread, as many as the budget requires, at most all of them."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.offload.weights.layer_placement import (
    BUFFERS,
    LayerPlacement,
    bytes_to_save,
    place_layers,
    spread,
    streamed_to_save,
)


def ring_gaps(num_layers: int, streamed: tuple[int, ...]) -> list[int]:
    """Layers between neighbours, the last layer's neighbour being the first of the next step."""
    return [(after - before) % num_layers for before, after in zip(streamed, (*streamed[1:], streamed[0]), strict=True)]


@given(st.integers(1, 130), st.data())
def test_streamed_layers_are_as_far_apart_as_can_be(num_layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, num_layers))
    streamed = spread(num_layers, count)
    assert len(set(streamed)) == count and list(streamed) == sorted(streamed)
    assert all(0 <= layer < num_layers for layer in streamed)
    if 1 < count < num_layers:
        gaps = ring_gaps(num_layers, streamed)
        assert max(gaps) - min(gaps) <= 1


def test_spread_by_example() -> None:
    assert spread(8, 0) == ()
    assert spread(8, 1) == (4,)
    assert spread(8, 2) == (2, 6)
    assert spread(8, 4) == (1, 3, 5, 7)
    assert spread(4, 4) == (0, 1, 2, 3)


@given(st.integers(1, 100), st.integers(1, 10**9), st.integers(0, 10**12))
def test_the_device_holds_as_much_less_as_was_asked(num_layers: int, layer_bytes: int, save_bytes: int) -> None:
    placement = place_layers(num_layers, layer_bytes, save_bytes)
    whole = num_layers * layer_bytes
    assert placement.device_bytes + placement.saved_bytes == whole
    assert placement.host_bytes + placement.num_resident * layer_bytes == whole
    if len(placement.streamed) < num_layers:
        assert placement.saved_bytes >= save_bytes
        assert placement.saved_bytes - save_bytes < layer_bytes  # and not one layer more than needed
    else:
        assert placement.device_bytes == min(BUFFERS, num_layers) * layer_bytes


def test_nothing_streams_unless_something_is_to_be_saved() -> None:
    assert streamed_to_save(28, 1000, 0) == 0
    assert place_layers(28, 1000, 0) == LayerPlacement(28, 1000, ())


def test_two_buffers_come_on_top_of_the_layers_that_are_saved() -> None:
    placement = place_layers(8, 1000, 2500)
    assert (len(placement.streamed), placement.saved_bytes, placement.buffer_bytes) == (5, 3000, 2000)


def test_what_the_device_lacks_is_saved_whether_asked_or_not() -> None:
    assert bytes_to_save(needed_bytes=100, budget_bytes=120) == 0
    assert bytes_to_save(needed_bytes=100, budget_bytes=70) == 30
    assert bytes_to_save(needed_bytes=100, budget_bytes=70, asked_bytes=50) == 50
    assert bytes_to_save(needed_bytes=100, budget_bytes=-20, asked_bytes=50) == 120
