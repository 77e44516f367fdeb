"""Pictures that verbs draw: the file of --plot, checked before any work, and a figure that is written to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


@contextmanager
def drawn(file: Path, panels: int) -> Iterator[tuple[Any, Any]]:
    """Gives a figure and its panels, side by side, and writes it in the end. SettingsError when that fails."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(13, 3.6))
    try:
        yield figure, axes
        figure.tight_layout()
        figure.savefig(file, dpi=130)
    except OSError as error:
        raise SettingsError(f"{file} cannot be written: {error.strerror}", "--plot") from error
    finally:
        pyplot.close(figure)
