"""DryRun: check with the loader's own code what loading a model would find, before any weight is read."""

import dataclasses

import msgspec
import torch

from octavo.config import Config
from octavo.errors import ConfigError
from octavo.kernels.torch_ops import torch_ops
from octavo.layers.context import BuildContext
from octavo.messages import EngineReport, LoadReport
from octavo.models import load_family
from octavo.spec import ModelSpec
from octavo.weights.adapters.adapter_file import check_rank, open_adapter
from octavo.weights.formats.checkpoint import Checkpoint
from octavo.weights.methods.base import Use
from octavo.weights.methods.cpu_native_experts import NativeExperts
from octavo.weights.methods.registry import Methods
from octavo.weights.sources.source import ModelSource
from octavo.worker.adapters import check_fit, experts_of, linears_of, targets_of, translated
from octavo.worker.load import Loader
from octavo.worker.memory.page_count import in_words, settle
from octavo.worker.outline import outline_of

_META = torch.device("meta")  # tensors with a shape and no data


class DryRun:
    """Call the checks in the order in which they stand. Each describes what it found, or raises the ConfigError of a start."""

    spec: ModelSpec
    _checkpoint: Checkpoint
    _context: BuildContext

    def __init__(self, config: Config, source: ModelSource) -> None:
        self._config = config
        self._loader = Loader(config, source)

    def configuration(self) -> str:
        self._checkpoint = self._loader.open()
        spec = self.spec = self._loader.spec
        return (
            f"{spec.family}: {spec.num_layers} layers, hidden size {spec.hidden_size}, {spec.num_heads} heads of "
            f"{spec.head_size} ({spec.num_kv_heads} for keys and values), vocabulary {spec.vocab_size:,}, "
            f"context {spec.context_len:,}"
        )

    def arithmetic(self) -> str:
        """Which kernels compute, in which types, and whether the family can be built with them."""
        loader = self._loader
        self._context = loader.choose(self._checkpoint)
        # Kernels hold weights in their own layouts, which need the data; slots and their shapes are the same with torch.
        dtype = loader.weight_dtype
        rank = self._context.methods.settings
        outline = dataclasses.replace(
            rank,
            device=_META,
            dtype=dtype,
            ops=torch_ops(_META, dtype),
            quantization="",
            has_triton=False,
        )
        loader.build(self._checkpoint, dataclasses.replace(self._context, methods=Methods(outline, rank)))
        if (draft := loader.draft) is not None:
            rank = draft.context.methods.settings
            outline = dataclasses.replace(outline, packed_types=rank.packed_types, weight_dtype=rank.weight_dtype)
            draft.build(draft.checkpoint, dataclasses.replace(draft.context, methods=Methods(outline, rank)))
        report = self._report()
        pages = f"KV pages in {report.kv_dtype}" if report.can_generate else "an encoder"
        return "; ".join([f"{report.device}, {report.dtype}, {pages}", *report.notes])

    def tensors(self) -> str:
        """Load the model as usual, from tensors that have only names and shapes."""
        weights = self._checkpoint.weights
        if weights is None:
            return "none are needed: --load-format dummy makes random ones"
        tensors = list(self._checkpoint.tensors(_META, self._loader.weight_dtype))
        self._loader.model.load(iter(tensors))
        if (draft := self._loader.draft) is not None and draft.checkpoint.weights is not None:
            draft.model.load(draft.checkpoint.tensors(_META, draft.weight_dtype))
        stored = f"packed ({weights.packing_label})" if weights.packing_label else weights.stored_dtype
        return (
            f"{len(tensors)} tensors, {in_words(weights.num_bytes)}, {stored}; none is missing, and every shape is what "
            "the configuration asks for"
        )

    def numbers(self) -> str:
        """Read every weight and check that it is finite. Takes as long as reading the checkpoint from disk."""
        count = 0
        for name, tensor in self._checkpoint.tensors("cpu", torch.float32):
            assert isinstance(tensor, torch.Tensor), "nothing was asked to stay packed"
            num_wrong = int(tensor.numel() - torch.isfinite(tensor).sum())
            if num_wrong:
                raise ConfigError(
                    f"tensor {name} holds {num_wrong:,} numbers of {tensor.numel():,} that are NaN or infinite: "
                    "the weights are damaged, fetch them again"
                )
            count += tensor.numel()
        return f"all {count:,} are finite"

    def adapter(self, path: str, max_rank: int) -> str:
        """Whether an adapter fits the model."""
        file = open_adapter(path)
        check_rank(file, max_rank)
        model, family = self._loader.model, load_family(self._checkpoint.config["model_type"])
        numbers = [0 if linear.request.use is Use.PRODUCT else None for linear in linears_of(model)]
        of_experts = [(0, 0) if isinstance(one.weights, NativeExperts) else None for _, one in experts_of(model)]
        targets = targets_of(outline_of(self._checkpoint, self.spec, self._context), numbers, of_experts)
        check_fit(file, targets, lambda its, name: translated(its, name, model, family), self.spec.family)
        ranks = sorted({pair.rank for pair in file.pairs.values()})
        kinds = sorted({name.rsplit(".", 1)[-1] for name in file.pairs})
        return (
            f"{path}: changes {len(file.pairs)} matrices ({', '.join(kinds)}), rank {', '.join(map(str, ranks))}; takes "
            f"{in_words(file.num_weights * (2 if self._loader.weight_dtype == torch.bfloat16 else 4))}"
        )

    def needs(self) -> LoadReport:
        """The report as if the weights were loaded: what they take, what a page takes, what is left."""
        available = self._loader.device.memory_available()
        self._loader.weights.check_fit(self._checkpoint, available)
        weights_bytes = self._loader.weights.needed(self._checkpoint)
        if (draft := self._loader.draft) is not None:
            draft.weights.check_fit(draft.checkpoint, available - weights_bytes)
            weights_bytes += draft.weights.needed(draft.checkpoint)
        report = self._report()
        return msgspec.structs.replace(
            report,
            weights_bytes=weights_bytes,
            available_bytes=available - weights_bytes,
            host_available_bytes=report.host_available_bytes - (0 if self._loader.device.is_cuda else weights_bytes),
        )

    def settled(self, needs: LoadReport) -> EngineReport:
        """The report that a server would start with."""
        return settle(self._config.cache, [needs])

    def _report(self) -> LoadReport:
        return self._loader.report(self._context.dtype, None)
