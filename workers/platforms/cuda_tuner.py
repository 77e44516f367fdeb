"""The Tuner of a CUDA device, where Triton is installed."""

from collections.abc import Sequence
from importlib.metadata import version

import torch

from tandem.offload.copies.accelerator import Accelerator
from tandem.workers.graphs.cuda_graphs import CaptureGraph
from tandem.workers.kernels.triton.triton_attention import H100, Multiprocessors
from tandem.workers.tuning.call_timer import CallTimer
from tandem.workers.tuning.model_uses import tunables_of
from tandem.workers.tuning.trials import Tunable
from tandem.workers.tuning.tuned_start import TunedModel
from tandem.workers.tuning.tuning_file import TunedDevice, source_digest


class CudaTuner:
    """A Tuner. capture: of graphs that no step is in."""

    def __init__(
        self,
        device: torch.device,
        accelerator: Accelerator,
        capture: CaptureGraph,
        multiprocessors: Multiprocessors | None,
    ) -> None:
        self._device = device
        facts = torch.cuda.get_device_properties(device)
        self._multiprocessors = multiprocessors or H100
        self.timer = CallTimer(accelerator, capture)
        self.device = TunedDevice(
            gpu=str(facts.name),
            capability=f"{facts.major}.{facts.minor}",
            torch=torch.__version__,
            triton=version("triton"),
            source=source_digest(),
        )

    def tunables(self, model: TunedModel) -> Sequence[Tunable]:
        return tunables_of(model, self._device, self._multiprocessors)

    def release(self) -> None:
        torch.cuda.empty_cache()
