"""What packing chunks costs a model, and what packs them: measured once per codec and weights."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvboost.codec import Codec
from kvboost.config import Settings
from kvboost.hf.compat import PreTrainedModel
from kvboost.hf.prefill import model_lock
from kvboost.hf.quant_probe import QuantProbe, probe_quantization
from kvboost.hf.support import ModelSupport
from kvboost.store.writing import Encode

logger = logging.getLogger("kvboost")

MAX_PROBES = 8  # kept at a time, one per codec and weights


class Quantization:
    """Measures and packs for one model; `fingerprint` names its weights now. Thread-safe."""

    def __init__(self, model: PreTrainedModel, support: ModelSupport, fingerprint: Callable[[], bytes]) -> None:
        self._model = model
        self._support = support
        self._fingerprint = fingerprint
        self._probes: dict[tuple[Codec, bytes], QuantProbe] = {}
        self._measured: dict[Codec, tuple[QuantProbe, QuantProbe]] = {}

    def measure(self, codec: Codec) -> QuantProbe:
        """What `codec` costs this model: by one short forward, again when the weights have changed."""
        name = (codec, self._fingerprint())
        with model_lock(self._model):
            if name not in self._probes:
                while len(self._probes) >= MAX_PROBES:
                    del self._probes[next(iter(self._probes))]
                self._probes[name] = probe_quantization(self._model, self._support, codec)
                if self._probes[name].refused is not None:
                    logger.warning("chunks are kept as computed, not as %s: %s", codec, self._probes[name].refused)
            first, _ = self._measured.get(codec, (self._probes[name], None))
            self._measured[codec] = first, self._probes[name]
            return self._probes[name]

    def measured(self, codec: Codec) -> tuple[QuantProbe, QuantProbe] | None:
        """The first and the latest result of `measure(codec)`; None before the first. Measures nothing."""
        return self._measured.get(codec)

    def encoder(self, settings: Settings, num_tokens: int) -> Encode | None:
        """What packs the records of a prompt of so many tokens, if the settings ask for it and the model allows it."""
        if settings.codec == "none":
            return None
        layout, regime = self._support.require_layout(), self._support.regime(num_tokens)
        packer = self.measure(settings.codec).packer(layout, regime)
        return None if packer is None else packer.encode
