"""Every exception that KVBoost raises on purpose.

    KVBoostError
    ├── SettingsError      a setting has a value that cannot be honoured (also a ValueError)
    ├── InputError         a prompt, message list or document cannot be used (also a ValueError)
    ├── ModelError         a model or tokenizer cannot be loaded or does not fit the other
    ├── OutOfMemory        a prompt does not fit the device, even without the cache (also a MemoryError)
    ├── UnsupportedModel   a model cannot serve a kind of reuse; never leaves the engine, it becomes a fallback reason
    └── DamagedRecord      bytes are not the record that was packed; never leaves a store, it becomes a miss
        └── ForeignRecord  the same, but under another secret it may be sound

A request never fails because the cache does: store and reuse problems fall back to computing and are counted.
"""


class KVBoostError(Exception):
    """Base of all errors raised on purpose by KVBoost."""


class SettingsError(KVBoostError, ValueError):
    """A setting's value is invalid. The message names the setting, the value, where it came from and the remedy.

    `setting` is its name, None where several do not fit one another.
    """

    def __init__(self, message: str, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting


class InputError(KVBoostError, ValueError):
    """The caller's input cannot be processed: empty, longer than the model's limit, or of the wrong type."""


class ModelError(KVBoostError):
    """A model directory or tokenizer is missing, damaged, or does not belong to the model."""


class OutOfMemory(KVBoostError, MemoryError):
    """The prompt does not fit the device's memory, even after the cache gave its own back."""


class UnsupportedModel(KVBoostError):
    """The model cannot serve a kind of reuse. `args[0]` is the reason that a user reads."""


class DamagedRecord(KVBoostError):
    """Bytes are not a record as it was packed and sealed: damaged, cut, forged, or of another format or secret."""


class ForeignRecord(DamagedRecord):
    """A record that this seal does not open and cannot judge: sealed under another secret, or damaged."""
