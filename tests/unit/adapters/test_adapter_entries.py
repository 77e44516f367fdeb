"""How a request's `model` finds an adapter, and for whom."""

import pytest

from tandem.cluster.adapters.entries import AdapterEntry, find, is_name

DIGEST = "0123456789abcdef" * 4
ENTRIES = {
    entry.name: entry
    for entry in (
        AdapterEntry(name="pirate", digest=DIGEST, source="/a/pirate"),
        AdapterEntry(name="org/legal", digest="f" * 64, source="/a/legal", tenant="acme"),
    )
}
BASES = ("demo", "org/base:8b")


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("pirate", "pirate"),
        ("demo:pirate", "pirate"),
        ("org/base:8b:pirate", "pirate"),
        (f"pirate@{DIGEST}", "pirate"),
        ("pirate@01234567", "pirate"),
        ("demo:pirate@0123456789", "pirate"),
        ("org/legal", "org/legal"),
        ("demo:org/legal", "org/legal"),
        ("pirate@0123456", None),  # too short to mean one version
        ("pirate@", None),
        ("pirate@89abcdef", None),
        ("pirate@" + DIGEST + "0", None),
        ("other:pirate", None),
        ("demo:", None),
        ("demo:demo", None),
        ("Pirate", None),
        ("", None),
        ("@", None),
    ],
)
def test_a_model_names_an_adapter(model: str, found: str | None) -> None:
    entry = find(model, BASES, ENTRIES, "acme")
    assert (entry.name if entry is not None else None) == found


@pytest.mark.parametrize("model", ["org/legal", "demo:org/legal", "org/legal@ffffffff"])
def test_anothers_adapter_is_not_there(model: str) -> None:
    assert find(model, BASES, ENTRIES, "acme") is not None
    assert find(model, BASES, ENTRIES, "other") is None
    assert find(model, BASES, ENTRIES, "default") is None


@pytest.mark.parametrize("name", ["a", "7b", "org/name-1.0_x", "A" * 128])
def test_names(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize("name", ["", ".a", "/a", "a:b", "a@b", "a b", "a\n", "é", "A" * 129, '"', "@version"])
def test_no_names(name: str) -> None:
    assert not is_name(name)
