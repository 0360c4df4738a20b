"""Reports: records in, one self-contained HTML file out."""
