"""The load of a simulation: the rows of --trace, and what --load makes of them."""

from pathlib import Path

from tandem.cluster.cli.base.terminal import say
from tandem.cluster.cli.bench.data_sets.data_flags import DataFlags
from tandem.cluster.cli.bench.data_sets.timed_traces import TraceReader, scaled_block
from tandem.cluster.cli.simulate.simulate_flags import TraceFlags
from tandem.cluster.simulator.loads import SimulatedRequest, TraceRow, generated_rows, make_load
from tandem.configs.errors import SettingsError

FLAG = "--trace"
MADE_UP, MADE_UP_RATE = 1000, 4.0


def read_load(flags: TraceFlags, max_model_len: int) -> list[SimulatedRequest]:
    """Makes the requests of a simulation. SettingsError for a trace that cannot be read or has none that the model's
    context holds; others are left out, and that is said."""
    rows = _rows(flags)
    load = make_load(flags.load, rows, flags.seed)
    fitting = [one for one in load if one.input_len + one.output_len <= max_model_len]
    if not fitting:
        raise SettingsError(
            f"{flags.trace or 'the made-up trace'}: no request fits a context of {max_model_len} tokens", FLAG
        )
    if len(fitting) < len(load):
        left_out = len(load) - len(fitting)
        say(f"{left_out} of {len(load)} requests are longer than the context of {max_model_len} tokens and left out")
    return fitting


def _made_up(flags: TraceFlags) -> list[TraceRow]:
    """Rows for want of a trace, of short conversations."""
    for name, value in flags.of_file().items():
        if value != TraceFlags.__dataclass_fields__[name].default:
            raise SettingsError(f"{value}: is of a file, and --trace names none", f"--{name.replace('_', '-')}")
    return generated_rows(flags.num_prompts or MADE_UP, flags.request_rate or MADE_UP_RATE, flags.seed)


def _rows(flags: TraceFlags) -> list[TraceRow]:
    """The rows of the trace, in the order of their times."""
    if flags.trace is None:
        return _made_up(flags)
    if flags.request_rate is not None:
        raise SettingsError(f"{flags.request_rate:g}: the times are those of --trace {flags.trace}", "--request-rate")
    if not Path(flags.trace).is_file():
        raise SettingsError(f"{flags.trace}: no such file", FLAG)
    data = DataFlags(dataset_name="timed_trace", dataset_path=flags.trace, **flags.of_file())
    reader, names = TraceReader(data, needs_times=True, path_flag=FLAG), dict[object, int]()
    try:
        rows = [
            TraceRow(
                line.due_s or 0.0,
                line.input_len,
                line.output_len,
                tuple(names.setdefault(one, len(names)) for one in line.hash_ids),
                scaled_block(data),
            )
            for line in reader.lines(flags.num_prompts)
        ]
    except OSError as error:
        raise SettingsError(f"{flags.trace} cannot be read: {error.strerror}", FLAG) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{flags.trace} is not UTF-8", FLAG) from error
    if not rows:
        raise SettingsError(f"{flags.trace}: no row with tokens", FLAG)
    if reader.num_empty:
        say(f"{reader.num_empty} rows of {flags.trace} have no tokens and are left out")
    return sorted(rows, key=lambda row: row.at_s)
