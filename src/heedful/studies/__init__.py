"""Studies that train and compare models: configs, corpora, runs and records. Needs `pip install 'heedful[studies]'`."""
