"""Block keys name content: anything that changes KV, or must keep it apart, changes the key."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.offload.kv.block_key import KEY_BYTES, block_key, root_key

BASE = ("revision", "bfloat16", None, "")


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(("revision2", "bfloat16", None, ""), id="model"),
        pytest.param(("revision", "float32", None, ""), id="dtype"),
        pytest.param(("revision", "bfloat16", "digest", ""), id="adapter"),
        pytest.param(("revision", "bfloat16", "", ""), id="empty adapter is not none"),
        pytest.param(("revision", "bfloat16", None, "salt"), id="salt"),
    ],
)
def test_every_field_of_the_root_matters(other):
    assert root_key(*BASE) != root_key(*other)


def test_fields_do_not_run_together():
    fields = [("a", "bc"), ("ab", "c"), ("", "abc"), ("abc", "")]
    assert len({root_key("m", "d", adapter, salt) for adapter, salt in fields}) == len(fields)


def test_equal_content_has_one_key_in_every_process():
    assert root_key("m", "d", "a", "s").hex() == "08e3ca94f23bed1783968c1ce2557c20"
    assert block_key(bytes(16), [1, 2, 3]).hex() == "4af72e58c2dbbd3cd96af0e3f2ded61e"


def test_a_key_depends_on_the_whole_prefix_and_its_order():
    keys = set()
    for first, second in itertools.permutations([(1, 2), (2, 1), (1, 3)], 2):
        keys.add(block_key(block_key(root_key(*BASE), first), second))
    assert len(keys) == 6 and all(len(key) == KEY_BYTES for key in keys)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_different_tokens_have_different_keys(one, other):
    assert (block_key(b"p", one) == block_key(b"p", other)) == (one == other)
