"""GPT-2's spelling of bytes as printable characters, in which byte-level vocabularies are written."""


def byte_level_alphabet() -> list[str]:
    """Returns GPT-2's character for each of the 256 bytes: itself where printable, else the next from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(free)) for byte in range(256)]
