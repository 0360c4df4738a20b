"""Attention over keys that lie a stride apart: dense or windowed attention inside residue classes."""
