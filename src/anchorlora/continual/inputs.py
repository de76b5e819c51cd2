"""Inputs of a run before its first task: model, data, adapters, and what it goes on from; whatever is wrong is refused here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor, nn

from anchorlora.adapters import NOTHING, AdapterStack, lora_layers, refuse_misfit
from anchorlora.adapters.files import fitted, read_with_whole
from anchorlora.adapters.sharding import call_with_hooks
from anchorlora.adapters.targets import split_by_text
from anchorlora.adapters.whole import NO_WHOLE, WholeWeights, put_whole
from anchorlora.config import Recipe, Start
from anchorlora.constraints.sensitivity import TASKS, knows, sensitivity
from anchorlora.continual.callback import Tell
from anchorlora.continual.data import TaskData
from anchorlora.continual.losses import ExampleLosses
from anchorlora.continual.past import Past
from anchorlora.continual.served import Served
from anchorlora.data import Encoded, Encoder, TaskSource
from anchorlora.errors import InvalidValue, UnknownName
from anchorlora.features import read_cores
from anchorlora.features.files import read_tensors
from anchorlora.geometry import Factors, Subspace
from anchorlora.methods import Method
from anchorlora.models.load import LoadedModel, ends_of, limits_in
from anchorlora.models.packing import unpackable
from anchorlora.processes import ALONE, Processes, accelerator_on


@dataclass(frozen=True, eq=False)
class RunInputs:
    """All that a run reads, loaded and tokenized, with the adapters attached: bad data and settings are refused here."""

    base_model: LoadedModel  # the frozen model with its tokenizer
    source: TaskSource  # where the tasks come from
    recipe: Recipe
    data: TaskData  # training and test examples as tokens, with the order of the tasks and the seed of all random streams
    adapters: AdapterStack  # the adapters on the base model's layers
    accelerator: Accelerator  # accelerate's view of the device
    unpacked: str | None = None  # why the model cannot read packed rows; None where it can
    processes: Processes = ALONE  # those that make the run together
    served: Served | None = None  # the base model in vLLM, if that answers
    old_factors: Mapping[str, Factors] = field(default_factory=dict)
    old_cores: Mapping[str, Subspace] = field(default_factory=dict)  # layer path -> core that the first task must keep already
    old_memory: Mapping[str, Tensor] = field(default_factory=dict)  # what constraints remember already, as if a task had ended

    @property
    def before(self) -> int:
        """Tasks that count as trained before the first: 1 if the run goes on from an adapter, cores, a memory or text, else 0."""
        return 1 if self.old_factors or self.old_cores or self.old_memory or self.data.old is not None else 0

    def go_on(self, method: Method) -> None:
        """Put the adapter that the run goes on from, if any, where a method's first task begins."""
        if self.before:
            start = self.recipe.start
            method.refuse_without_memory(start.old_memory or "an adapter or a file of cores", self.old_memory)
            if method.provided_cores is not None and self.old_cores:
                raise InvalidValue(f"{method.name} makes its cores of old_memory; leave old_cores out ({start.old_cores})")
        if not self.old_factors:
            return
        try:
            method.plan.resume(self.adapters, self.old_factors, NOTHING)
        except (KeyError, InvalidValue) as error:
            why = error.args[0] if isinstance(error, InvalidValue) else f"it needs {error.args[0]!r}, which no adapter holds"
            raise InvalidValue(f"{method.name} cannot continue from {self.recipe.start.old_adapter}: {why}") from None

    def losses(self, name: str) -> ExampleLosses:
        """Return the losses of a task's examples, in training order."""
        train, order = self.data.train[name], self.data.shuffled(name, 1)
        pad = self.base_model.model.generation_config.pad_token_id

        def chosen(count: int) -> list[Encoded]:
            return [train[i] for i in order[:count]]

        return ExampleLosses(self.adapters.model, chosen, self.base_model.device, packed=self.unpacked is None, pad=pad)

    def past(self, method: Method) -> Past:
        """Return the past before the first task."""
        given, memory, provided = self.old_cores, self.old_memory, method.provided_cores
        return Past.empty(self.recipe.features, device=self.base_model.device, given=given, remembered=memory, provided=provided)

    @classmethod
    def of(
        cls,
        base_model: LoadedModel,
        source: TaskSource,
        recipe: Recipe,
        *,
        order: Sequence[str],
        seed: int,
        processes: Processes = ALONE,
        tell: Tell | None = None,
    ) -> RunInputs:
        """Read and tokenize the data, reporting progress to `tell`, and attach the adapters."""
        old_factors, whole, old_cores, old_memory = _old(base_model, recipe.start)
        put_whole(base_model.model, whole, where=str(recipe.start.old_adapter))
        served = None
        if recipe.evaluation.backend == "vllm":
            if whole.tensors:
                raise InvalidValue(
                    f"{recipe.start.old_adapter} comes with whole weights ({whole}), which vLLM does not take beside an adapter; "
                    "set backend=transformers"
                )
            served = Served(base_model, quantized=recipe.base_model.quantized, processes=processes)
        encoder = Encoder(
            base_model.tokenizer,
            max_tokens=recipe.training.max_tokens,
            ends=ends_of(base_model.model),
            **limits_in(base_model.model),
        )
        data = TaskData.of(source, encoder, recipe.tasks, order, seed, recipe.start.old_text, tell=tell)
        settings = dict(recipe.adapter)
        if old_factors:
            settings["targets"] = tuple(sorted(old_factors))
        adapters = AdapterStack(base_model.model, **settings)
        adapters.whole = whole
        if lost := sorted(set(adapters.stacked()) - set(old_cores)) if old_cores else []:
            raise InvalidValue(f"{recipe.start.old_cores} has no core for {lost[0]}; make cores for all layers that are adapted")
        if recipe.start.old_memory is not None:
            _refuse_foreign(old_memory, adapters.stacked(), where=str(recipe.start.old_memory))
        accelerator = accelerator_on(base_model.device)
        if processes.sharded:
            _split(base_model.model, accelerator)
            call_with_hooks(adapters.model)
        if recipe.training.gradient_checkpointing:
            model = base_model.model  # transformers drops the older name in version 6
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        unpacked = unpackable(adapters.model, data.sample(), longest=data.longest(recipe.evaluation.max_new_tokens))
        kept = {layer: old_cores[layer] for layer in adapters.stacked()} if old_cores else {}
        made = data, adapters, accelerator, unpacked, processes, served
        return cls(base_model, source, recipe, *made, old_factors, kept, old_memory)


def _old(
    base_model: LoadedModel, start: Start
) -> tuple[Mapping[str, Factors], WholeWeights, Mapping[str, Subspace], Mapping[str, Tensor]]:
    """The adapter, what comes with it, the cores and the memory that a run goes on from."""
    factors, whole = NOTHING, NO_WHOLE
    if start.old_adapter is not None:
        factors, whole = read_with_whole(Path(start.old_adapter).expanduser())
        factors = fitted(factors, [name for name, _ in base_model.model.named_modules()], where=start.old_adapter)
        refuse_misfit(base_model.model, factors, where=start.old_adapter)
        factors, unread = split_by_text(base_model.model, factors, where=start.old_adapter)
        whole = replace(whole, unread=unread)
    cores = read_cores(Path(start.old_cores).expanduser()) if start.old_cores is not None else NOTHING
    memory = read_tensors(Path(start.old_memory).expanduser()) if start.old_memory is not None else NOTHING
    return factors, whole, cores, memory


def _split(model: nn.Module, accelerator: Accelerator) -> None:
    """Split a base model over the processes (FSDP2), as the launcher's settings say; LoRA factors stay whole."""
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model

    state = accelerator.state
    if getattr(state, "fsdp_plugin", None) is None:  # Accelerate makes none on CPUs
        state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    state.fsdp_plugin.cpu_ram_efficient_loading = False  # every process has read the model
    factors = [part for layer in lora_layers(model).values() for part in (layer.lora_A, layer.lora_B)]
    state.fsdp_plugin.ignored_modules = factors
    fsdp2_prepare_model(accelerator, model)


def _refuse_foreign(memory: Mapping[str, Tensor], adapted: Mapping[str, Factors], *, where: str) -> None:
    """Raise if a memory belongs to other layers, or to none."""
    if not memory:
        raise InvalidValue(f"{where} remembers nothing; give a file that a method with a memory has left")
    for layer, f in adapted.items() if knows(memory) else ():
        try:
            sensitivity(memory, layer, d_in=f.A.shape[1], d_out=f.B.shape[0])
        except UnknownName as error:
            raise InvalidValue(f"{where}: {error}") from None
    wrong = next((name for name in memory if "/" in name and name != TASKS and not any(layer in name for layer in adapted)), None)
    if wrong is not None:
        raise InvalidValue(f"{where} knows {wrong}, which is not an adapted layer; give the memory of the same targets")
