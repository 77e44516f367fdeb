"""ModelText: the tokenizer, the chat template and the formats of a service's model, read from its folder.

Read by the gateway, and before anything starts by the launcher and `tandem check-config`, so that they refuse the same
with the same words. Torch-free.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.cluster.gateway.conversation.format_choice import ChosenFormats, choose_formats
from tandem.configs.schema import ModelSettings, ServiceSettings
from tandem.workers.build import model_generation, pair_judge
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.text.chat_template import ChatTemplate, find_chat_template
from tandem.workers.text.pair_judge import PairJudge
from tandem.workers.text.tokenizer import ModelTokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """spec: of the model's config.json. template: None when the model has none. eos_token_ids: at which the engine ends
    a text by itself."""

    spec: ArchSpec
    tokenizer: ModelTokenizer
    template: ChatTemplate | None
    formats: ChosenFormats
    eos_token_ids: tuple[int, ...]
    judge: PairJudge | None = None

    def notes(self) -> Iterator[str]:
        """Lines for an operator: a format that the template has chosen, what does not count in the tokenizer's files,
        and ids that the model has no rows for."""
        if self.formats.note is not None:
            yield self.formats.note
        yield from self.tokenizer.remarks
        size, rows = self.tokenizer.vocab_size, self.spec.vocab_size
        if size > rows:
            yield (
                f"the tokenizer has {size} tokens, the model's vocabulary (vocab_size) {rows}: texts with tokens from "
                f"{rows} on are refused"
            )
        if beyond := [token_id for token_id in self.eos_token_ids if token_id >= rows]:
            yield (
                f"eos_token_id {', '.join(map(str, beyond))} is outside the model's vocabulary (0 to {rows - 1}): no "
                "text ends with it"
            )


def read_model_text(settings: ServiceSettings) -> ModelText:
    """Reads what a gateway needs of a model that is a folder. SettingsError when it is missing, broken or not read."""
    model = settings.engine.model
    spec = load_spec(model.model, model.hf_overrides or None)
    generation = model_generation(model, spec)
    folder, flag = text_folder(model)
    tokenizer = load_tokenizer(folder, generation, flag)
    template = find_chat_template(folder, model.chat_template, tokenizer)
    formats = choose_formats(settings.gateway, None if template is None else template.for_tools.source)
    judge = pair_judge(model, tokenizer, template if model.chat_template else None)
    return ModelText(spec, tokenizer, template, formats, generation.eos_token_ids or (), judge)


def check_text(settings: ServiceSettings) -> tuple[str, ...]:
    """Checks all that read_model_text() reads. Returns ModelText.notes()."""
    return tuple(read_model_text(settings).notes())


def text_folder(model: ModelSettings) -> tuple[Path, str]:
    """The folder of a resolved model's tokenizer, and the name of what gives it."""
    return (Path(model.model), "MODEL") if model.tokenizer is None else (Path(model.tokenizer), "--tokenizer")
