"""What pytest passes over where an extra is not installed; the tests under tests/ say so themselves."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("transformers") else ["src/heedful/hf/*"]
