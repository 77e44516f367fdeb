"""The index of slots in shared memory: written keys are listed; a kill leaves no key beside another block's bytes."""

import mmap
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.offload.kv.slot_index import SlotIndex, index_bytes

ROOT = Path(__file__).resolve().parents[3]
NUM_SLOTS, PAGE_BYTES = 8, 4096


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@given(st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, 5))))
def test_the_index_is_a_mapping_of_slots_to_keys(changes):
    with mmap.mmap(-1, index_bytes(NUM_SLOTS)) as memory:
        index, model = SlotIndex(memory, NUM_SLOTS), {}
        for slot, number in changes:
            index.clear(slot)
            model.pop(slot, None)
            if number:
                index.write(slot, key(number))
                model[slot] = key(number)
            assert index.items() == sorted(model.items())
        assert SlotIndex(memory, NUM_SLOTS).items() == sorted(model.items()), "a later group reads the same"


def test_a_memoryview_will_do():
    index = SlotIndex(memoryview(bytearray(1000)), NUM_SLOTS)
    index.write(7, key(1))
    assert index.items() == [(7, key(1))]


def test_a_slot_in_use_is_not_overwritten():
    index = SlotIndex(memoryview(bytearray(index_bytes(NUM_SLOTS))), NUM_SLOTS)
    index.write(1, key(1))
    index.write(1, key(1))
    with pytest.raises(AssertionError, match="cleared before"):
        index.write(1, key(2))
    for slot in (-1, NUM_SLOTS):
        with pytest.raises(AssertionError):
            index.clear(slot)
    assert index.items() == [(1, key(1))]


WRITER = f"""
import itertools, mmap, sys
from tandem.offload.kv.slot_index import SlotIndex
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
index = SlotIndex(memory, {NUM_SLOTS})
for number in itertools.count(1):
    slot, key = number % {NUM_SLOTS}, number.to_bytes(16, "big")
    index.clear(slot)
    start = {PAGE_BYTES} * (1 + slot)
    memory[start : start + {PAGE_BYTES}] = key * ({PAGE_BYTES} // 16)
    index.write(slot, key)
    if number == 1000:
        print(flush=True)
"""


@pytest.mark.parametrize("round_number", range(5))
def test_a_killed_writer_leaves_no_key_beside_foreign_bytes(tmp_path, round_number):
    file = tmp_path / "memory"
    file.write_bytes(bytes(PAGE_BYTES * (1 + NUM_SLOTS)))
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(file)], cwd=ROOT, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    time.sleep(0.003 * round_number)  # killed at another moment each round
    writer.kill()
    writer.wait()
    writer.stdout.close()
    memory = memoryview(file.read_bytes())
    found = SlotIndex(memory, NUM_SLOTS).items()
    assert len(found) >= NUM_SLOTS - 1
    for slot, there in found:
        start = PAGE_BYTES * (1 + slot)
        assert memory[start : start + PAGE_BYTES] == there * (PAGE_BYTES // 16)
