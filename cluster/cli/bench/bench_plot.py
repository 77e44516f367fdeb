"""A picture of a load: first tokens and gaps by share of requests, tokens and requests by second."""

from importlib.util import find_spec
from pathlib import Path

from tandem.cluster.cli.bench.bench_figures import LoadFigures, requests_by_second, tokens_by_second
from tandem.configs.errors import SettingsError

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(given: str | None) -> Path | None:
    """The file of --plot. SettingsError, before anything is sent, when it could not be drawn."""
    if given is None:
        return None
    file = Path(given)
    if file.suffix not in SUFFIXES:
        raise SettingsError(f"{given}: must end with {', '.join(SUFFIXES)}", "--plot")
    if not file.resolve().parent.is_dir():
        raise SettingsError(f"{given}: there is no folder {file.parent}", "--plot")
    if find_spec("matplotlib") is None:
        raise SettingsError(f"{given}: matplotlib is not installed here; `pip install matplotlib`", "--plot")
    return file


def draw_load(figures: LoadFigures, file: Path, title: str) -> None:
    """Draws a run. SettingsError when the file cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = figures.good
    figure, (shares, rates, running) = pyplot.subplots(1, 3, figsize=(13, 3.6))
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
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=130)
    except OSError as error:
        raise SettingsError(f"{file} cannot be written: {error.strerror}", "--plot") from error
    finally:
        pyplot.close(figure)
