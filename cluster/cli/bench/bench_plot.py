"""A picture of a load: first tokens and gaps by share of requests, tokens and requests by second."""

from pathlib import Path

from tandem.cluster.cli.base.plot_file import drawn
from tandem.cluster.cli.bench.bench_figures import LoadFigures, requests_by_second, tokens_by_second


def draw_load(figures: LoadFigures, file: Path, title: str) -> None:
    """Draws a run. SettingsError when the file cannot be written."""
    good = figures.good
    with drawn(file, 3) as (figure, (shares, rates, running)):
        gaps = [gap for outcome in good for gap in outcome.itl_s]
        for name, seconds in (("TTFT", [outcome.ttft_s for outcome in good]), ("ITL", gaps)):
            ordered = sorted(1e3 * second for second in seconds)
            shares.plot(ordered, [100 * (place + 1) / len(ordered) for place in range(len(ordered))], label=name)
        shares.set(title="time to a token", xlabel="ms", ylabel="% within", xscale="log", ylim=(0, 100))
        shares.legend()
        rates.stairs(tokens_by_second(good))
        rates.set(title="output", xlabel="s", ylabel="tokens/s", ylim=(0, None))
        running.stairs(requests_by_second(good))
        running.set(title="requests that run", xlabel="s", ylim=(0, None))
        figure.suptitle(title)
