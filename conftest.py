"""Files whose doctests pytest skips if an extra is not installed; the tests under tests/ skip themselves."""

from importlib.util import find_spec

NEEDS = {
    "transformers": ["src/heedful/hf/*"],
    "tokenizers": ["src/heedful/studies/*"],
    "polars": [
        "src/heedful/store/scans.py",
        "src/heedful/scan*",
        "src/heedful/report/[dpw]*",
        "src/heedful/cli/scan_terminal.py",
    ],
}

collect_ignore_glob = [path for package, paths in NEEDS.items() if find_spec(package) is None for path in paths]
