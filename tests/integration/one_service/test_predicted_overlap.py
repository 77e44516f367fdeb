"""KV events in a real service: what the gateway predicts of a conversation's next turn is what its group finds."""

from prometheus_client.parser import text_string_to_metric_families

from tests.support.service import Service, wait_for

INDEX_TOKENS = 128
FIRST = [10 + i * 11 % 280 for i in range(400)]


def predictions(service: Service) -> tuple[float, float]:
    """Requests that were predicted, and those of them that were predicted right: within an index block."""
    families = text_string_to_metric_families(service.get("/metrics").text)
    (errors,) = (family for family in families if family.name == "tandem:route_overlap_error_tokens")
    counts = [(one.labels, one.value) for one in errors.samples if one.name.endswith("_bucket")]
    everything = sum(value for labels, value in counts if labels["le"] == "+Inf")
    (right,) = (value for labels, value in counts if (labels["le"], labels["direction"]) == ("127.0", "under"))
    return everything, right


def ask(service: Service, prompt: list[int], **more: object) -> tuple[int, bool]:
    """The prompt tokens that were found, and whether the gateway had predicted that."""
    (all_before, right_before) = predictions(service)
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}
    answer = service.post("/v1/completions", body).json()
    all_after, right_after = predictions(service)
    assert all_after == all_before + 1, "each prompt that is long enough is predicted"
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], right_after == right_before + 1


def is_told(service: Service) -> bool:
    """Whether groups have told the gateway anything: a second after both are ready."""
    before, _ = predictions(service)
    body = {"model": "demo", "prompt": FIRST[::-1][:150], "max_tokens": 1}
    assert service.post("/v1/completions", body).status_code == 200
    return predictions(service)[0] > before


def test_the_next_turn_of_a_conversation_is_predicted(service: Service) -> None:
    wait_for(lambda: is_told(service), 60, "the groups tell of their KV", 0.3)
    found, is_right = ask(service, FIRST)
    assert (found, is_right) == (0, True), "nobody has it"
    turn = [*FIRST, *FIRST[50:150]]

    def is_known() -> bool:
        found, is_right = ask(service, turn)
        return found >= 3 * INDEX_TOKENS and is_right

    wait_for(is_known, 60, "the groups that were asked have told what they have", 0.3)
    for length in range(500, 380, -17):
        found, is_right = ask(service, turn[:length])
        assert is_right, f"{found} tokens of {length} were found"
    assert ask(service, turn, cache_salt="another") == (0, True), "a salt keeps caches apart, and predictions"
