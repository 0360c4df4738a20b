"""Models trained and compared: configs, corpora, runs and their records. Needs `pip install 'heedful[studies]'`."""
