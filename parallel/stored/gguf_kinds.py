"""The types of GGUF's tensors (ggml_type of ggml.h): numbers, or blocks of elements that share scales. Torch-free."""

from typing import Final, NamedTuple


class GgufKind(NamedTuple):
    """A type. elements: of a row that are a block; bytes: of a block."""

    name: str  # of numbers as safetensors calls them
    elements: int
    bytes: int


KINDS: Final = {
    0: GgufKind("F32", 1, 4),
    1: GgufKind("F16", 1, 2),
    2: GgufKind("Q4_0", 32, 18),
    3: GgufKind("Q4_1", 32, 20),
    6: GgufKind("Q5_0", 32, 22),
    7: GgufKind("Q5_1", 32, 24),
    8: GgufKind("Q8_0", 32, 34),
    9: GgufKind("Q8_1", 32, 40),
    10: GgufKind("Q2_K", 256, 84),
    11: GgufKind("Q3_K", 256, 110),
    12: GgufKind("Q4_K", 256, 144),
    13: GgufKind("Q5_K", 256, 176),
    14: GgufKind("Q6_K", 256, 210),
    15: GgufKind("Q8_K", 256, 292),
    16: GgufKind("IQ2_XXS", 256, 66),
    17: GgufKind("IQ2_XS", 256, 74),
    18: GgufKind("IQ3_XXS", 256, 98),
    19: GgufKind("IQ1_S", 256, 50),
    20: GgufKind("IQ4_NL", 32, 18),
    21: GgufKind("IQ3_S", 256, 110),
    22: GgufKind("IQ2_S", 256, 82),
    23: GgufKind("IQ4_XS", 256, 136),
    24: GgufKind("I8", 1, 1),
    25: GgufKind("I16", 1, 2),
    26: GgufKind("I32", 1, 4),
    27: GgufKind("I64", 1, 8),
    28: GgufKind("F64", 1, 8),
    29: GgufKind("IQ1_M", 256, 56),
    30: GgufKind("BF16", 1, 2),
    34: GgufKind("TQ1_0", 256, 54),
    35: GgufKind("TQ2_0", 256, 66),
    39: GgufKind("MXFP4", 32, 17),
    40: GgufKind("NVFP4", 64, 36),
    41: GgufKind("Q1_0", 128, 18),
}
"""Kinds by their numbers, those that are not read too, so that they are refused by name."""
BLOCK_NAMES: Final = tuple(kind.name for kind in KINDS.values() if kind.elements > 1)
BY_NAME: Final = {kind.name: kind for kind in KINDS.values()}
