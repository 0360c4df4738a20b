"""Parallel corpora: sentences and their translations from Debian packages, or from a user's own files."""
